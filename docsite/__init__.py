"""The documentation's site. `make docs` builds it from docs/, some pages from elsewhere, and the code."""

from pathlib import Path

ROOT = Path(__file__).parents[1]

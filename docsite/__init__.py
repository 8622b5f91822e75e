"""The documentation's site: `make docs` builds it from docs/, README.md and the code. Not part of the package."""

from pathlib import Path

ROOT = Path(__file__).parents[1]

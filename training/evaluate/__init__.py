"""The exact score on the test split."""

"""The JobSpec: its settings, their types, the file they come from, cluster profiles."""

"""Pure functions from a JobSpec to a manifest: no cluster, no clock, no network; same spec, same bytes."""

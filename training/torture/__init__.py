"""`lockstep torture`: somebody's script, disturbed at seeded moments, and compared with itself undisturbed."""

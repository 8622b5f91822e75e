"""Training loops as users write them: scripts that use `lockstep.Session` and nothing else of Lockstep."""

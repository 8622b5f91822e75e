"""Loops of one's own, as strangers write them: scripts that know `lockstep.Session` and nothing else of ours."""

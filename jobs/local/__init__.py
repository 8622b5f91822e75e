"""Jobs as detached processes of this machine."""

"""Jobs as containers of this machine, through Docker Compose."""

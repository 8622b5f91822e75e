"""How Lockstep reaches a cluster: its commands and its files, from a machine of it or over ssh from elsewhere."""

"""Where the backends lay before each had a folder of its own: only what queued jobs still name."""

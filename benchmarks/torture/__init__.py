"""One small training with each of several libraries, for `lockstep torture`."""

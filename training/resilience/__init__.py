"""What keeps a run whole: signals, ranks that hang, gradients that are not finite, replicas that differ."""

"""`lockstep doctor gpu`: whether the GPUs of this machine compute, exchange and fail as the training expects of them."""

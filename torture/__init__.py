"""`lockstep torture`: disturbs a training script at seeded moments, and compares it with itself undisturbed."""

if __name__ != "lockstep.torture":  # else each class would exist twice
    raise ImportError(f"the package {__name__} is imported as lockstep.torture")

SUMMARY = "kill, stop and signal a training at seeded moments, and compare the weights it ends in"

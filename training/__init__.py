if __name__ != "lockstep.training":  # else each class would exist twice
    raise ImportError(f"the package {__name__} is imported as lockstep.training: from lockstep import Session")

if __name__ != "lockstep.training":  # a second copy of each class, beside the first
    raise ImportError(f"the package {__name__} is imported as lockstep.training: from lockstep import Session")

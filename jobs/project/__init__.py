"""`lockstep init`: a project of one's own that trains, passes its test and submits as it is."""

"""What `jobs` (outside a job) and `training` (inside it) exchange, and the signals that both hold back. Imports no torch.

`archive`: code that travels. `payload`: what a job hands its ranks. `exec`: a command in a rank's place. `signals`.
`progress`: what a rank shows of itself. `hangs`: who names the one that gets no further.
"""

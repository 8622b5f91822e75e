"""The exchange between `jobs` (outside a job) and `training` (inside it), and the signals that both hold back. Imports no torch.

`archive`: the user's code as an archive. `payload`: the options and the code that a job gives its ranks. `exec`: a command in a rank's
environment. `signals`: signals during a start. `progress`: the progress of a rank, and its stacks. `hangs`: the name of a rank that hangs.
`status`: entries of status.json. `submitit_api`: the parts of submitit that are not its public interface.
"""

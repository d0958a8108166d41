"""Writing the state of a run and reading it back.

folder    the files: hashes, the commit that a kill at any moment cannot break
plain     nested state as JSON and named tensors
command   `dtorch checkpoint`; listing, picture and aligned: what it prints
meeting   a save asked for by one rank only: when all ranks carry it out
"""

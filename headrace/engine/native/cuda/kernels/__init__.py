"""What runs on the GPU, one file per subject. The files above launch it.

Triton reads these functions' source: their arguments are pointers and numbers of its own, so the type checker is told to
leave them alone, here and nowhere else. Names in capitals are known when a kernel is compiled.
"""

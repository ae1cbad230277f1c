"""What runs on the GPU in training, one file per subject. As in the engine, Triton reads these functions' source."""

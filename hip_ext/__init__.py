"""ctypes bindings to GPU drivers, libraries and profilers."""

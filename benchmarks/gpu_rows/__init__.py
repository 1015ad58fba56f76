"""What ``benchmarks/gpu.py`` measures, a function a row; its process is ``__main__``."""

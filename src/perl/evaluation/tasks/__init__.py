"""The problems of a task as prompts: benchmarks, files of your own, held-out problems."""

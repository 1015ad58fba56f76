"""A recipe handed over to verl, and what verl trained brought back as a run.

Out: start reading at ``can_go.py``. Back: at ``come_back.py``. Nothing here imports verl but ``check_job.py``, which
runs beside it.
"""

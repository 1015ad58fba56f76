"""A recipe handed over to verl: what can go, the job folder, and the check that the job calls before a GPU is taken.

Start reading at ``can_go.py``. Nothing here imports verl but ``check_job.py``, which runs beside it.
"""

"""A run on a Ray cluster, which starts its processes and servers, and starts them again.

cluster -> checked; servers -> actors; processes -> Ray Train's workers; notices, numbers -> mailbox; ends -> hub

Ray schedules, places and restarts; what is here tells it what to start, and tells the run what Ray knows.
"""

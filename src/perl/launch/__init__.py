"""Several processes of one run: started, compared with each other and with what was asked, ended together.

Recipe -> processes -> the same recipe, versions and folder on all of them, or one line that says what differs
"""

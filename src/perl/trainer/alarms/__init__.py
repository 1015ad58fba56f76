"""Signs of an unhealthy training: one table of rules over what was logged.

logs of each step -> History -> rules -> a sign, or none

Imports no torch: rules are pure functions of numbers.
"""

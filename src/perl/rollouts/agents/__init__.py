"""Conversations of several turns: tools and environments, what the policy writes, and what they answer.

``module:Class``, ``module:function`` -> Agent; prompts, Agent, an engine -> Conversation
"""

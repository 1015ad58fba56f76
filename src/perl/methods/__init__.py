"""The PEFT methods: one table that drives how each is built."""

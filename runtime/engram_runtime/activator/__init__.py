"""Holds the first requests for a model that sleeps, and passes them on when it has woken up."""

"""Random use of clients, with faults, against a model of what must hold; see ``__main__``."""

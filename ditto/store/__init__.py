"""The store: the only SQL of ditto.

Reading order: `schema.py` (the tables), `transitions.py` (every write, and the state machine of a run),
`committer.py` (how writes become durable), `queries.py` (every read), `values.py` (what data looks like in it).
"""

"""A campaign of seeded faults against the project's commands, with the results judged from outside."""

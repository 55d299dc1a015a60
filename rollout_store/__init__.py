"""Everything that is logged: its schema, its tables and how to read them. Imports no sibling."""

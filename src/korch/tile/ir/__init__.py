"""The data of tile programs: index expressions, stages, their text form and its parser. Read `program.py` first."""

"""Parameters that a tower gathers from their owners when it needs them, not before its pass (stage 3 of ZeRO).

uses.py            which operations of the tower's graph read a parameter, and when
units.py           which uses one gather serves
exchange.py        what is exchanged with other processes, and in which order
copied.py          the gathers of all towers of a process, from those of the first one
rewired.py         the graph with the gathers in it
gathered_once.py   the tower as that graph, traced once
"""

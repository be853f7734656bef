"""Digital gates: integers that a circuit computes, the circuit as Verilog, and tools that check it."""

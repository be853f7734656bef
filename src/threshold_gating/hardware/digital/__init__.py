"""Digital gates: integers that a circuit computes, its Verilog, and tools that check both."""

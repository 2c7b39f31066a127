"""The conductor: problems go down the line of stages and become records."""

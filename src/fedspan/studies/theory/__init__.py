"""What the pFL-MF paper claims, checked by running it: Theorem 1, Examples 1 to 3 and Figure 1.

Every check returns an `Outcome`: a table, a sentence on what it shows, the numbers, and a figure.
"""

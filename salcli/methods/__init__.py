"""Every row of a table. A method is declared once, in the module of its family, together with its formula."""

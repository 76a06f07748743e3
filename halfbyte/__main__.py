"""`python -m halfbyte` is the command `halfbyte`."""

from halfbyte.cli import main

raise SystemExit(main())

from deepssm.cli import main

raise SystemExit(main())

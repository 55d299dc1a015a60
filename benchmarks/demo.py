"""The whole loop on the support desk: runs `make demo` and writes its figures."""

import sys

from examples.support_desk.demo import METHOD, main

if __name__ == "__main__":
    print(METHOD)
    sys.argv += ["--model", ".cache/smollm2-135m-instruct"]
    sys.exit(main())

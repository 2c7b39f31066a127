#include <stdint.h>
static long long seen[5];
long long* last(void) { return seen; }
const char* message(int code) { return code == -7 ? "misaligned operand" : "other"; }
int run(void* a, int32_t m, int64_t bytes, void* stream, float scale) {
    seen[0] = (long long)a; seen[1] = m; seen[2] = bytes; seen[3] = (long long)stream;
    seen[4] = (long long)(scale * 100);
    return a ? 0 : m > 5 ? 7 : -7;
}

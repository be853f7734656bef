/* Soft gates on a CPU in one pass over memory: y = sum_k g_k(x) (s_k x + c_k) and its gradients.

   `one_pass.py` compiles this file for each number of branches K and way of gates GATE. It is plain C,
   which a compiler turns into vector instructions by itself.

   Branches are counted from the one that wins far out on x's own side of `mid`, the mean of the
   thresholds weighed by their taus. Let E_m = exp(-tau_m |x - mid|) and, for x below mid,
   w_k = exp(-sum_{m<k} tau_m (theta_m - mid)); then the gates are

       g_k = w_k E_0 ... E_{k-1} / D,    D = w_0 + E_0 (w_1 + E_1 (w_2 + ...)),

   and above mid the same with branches and thresholds in reverse, because w_0 = w_{K-1} = 1, but for
   the rounding of mid. So D is hardly below 1, nothing overflows while the weights do not, one tau needs one exponential, and far
   out the gate that wins is exactly 1. `fold` computes the weights, in double.

   A value that is not finite is reported and nothing else: what infinities and NaN mean is decided
   in one place, in Python. */

#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define TWO 0 /* structure.Gate */
#define CENTRED 1
#define ONE_TAU 2
#define OWN_TAUS 3
#define MIRRORED 5 /* the same taus from either end: half of the exponentials are enough */

#define UNROLLED _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline))
#define J (K - 1)                       /* thresholds */
#define T (GATE >= OWN_TAUS ? J : 1) /* taus */
#define E (GATE == MIRRORED ? (T + 1) / 2 : T) /* exponentials */
/* Rows of the folded parameters, G numbers each: tau in units of log 2 comes first. */
enum {
    MID,
    EXPONENT,
    TAU = EXPONENT + T,
    THETA = TAU + T,
    W = THETA + J,
    S = W + K,
    C = S + K,
    WS = C + K,
    WC = WS + K,
    CHAIN = WC + K, /* what is learned of a tau is rho: d tau / d rho, or 1 */
    SMALL = CHAIN + T, /* whether branches can be counted from below everywhere */
    ROWS
};
/* Rows of the sums, for tau, theta, s and c: of the turns T_m of `tiles` times dy (x - theta_m), of
   them times dy, of dy g_k x and of dy g_k. */
enum { MOVED, TURN = MOVED + T, SLOPE = TURN + J, CONSTANT = SLOPE + K, SUMS = CONSTANT + K };

INLINE uint32_t bits_of(float a)
{
    uint32_t bits;
    memcpy(&bits, &a, 4);
    return bits;
}
INLINE float float_of(uint32_t bits)
{
    float a;
    memcpy(&a, &bits, 4);
    return a;
}
/* a where the mask is all ones, b where it is 0. Not `? :`, for which compilers go both ways. */
INLINE float chosen(uint32_t mask, float a, float b)
{
    return float_of((bits_of(a) & mask) | (bits_of(b) & ~mask));
}

/* 2^t and 2^t - 1 for t < 127; below 2^-126.5 it is 0. NaN is no concern: y has x as a factor. The
   polynomial for 2^r - 1 on [-1/2, 1/2] is off by 1.6e-8 of 2^r at most, less than its roundings. */
INLINE float power(float t, float *less_one)
{
    t = t > -127.0f ? t : -127.0f;
    float shifted = t + 12582912.0f; /* 1.5 * 2^23: the last bits are the nearest integer */
    float r = t - (shifted - 12582912.0f);
    float scale = float_of((bits_of(shifted) + 127) << 23); /* 0 for -127 */
    float q = 0.00015353362f;
    q = q * r + 0.0013398875f;
    q = q * r + 0.00961843692f;
    q = q * r + 0.0555033237f;
    q = q * r + 0.240226477f;
    q = (q * r + 0.693147182f) * r;
    *less_one = scale * q + (scale - 1.0f);
    return scale * q + scale;
}

INLINE int is_strange(float a) { return (bits_of(a) & 0x7f800000) == 0x7f800000; }

/* Where x lies: below mid or not, as a mask, and the exponentials of its thresholds. */
struct place {
    uint32_t low;
    float e[E], less_one;
};

INLINE struct place placed(float x, const float *p, long G)
{
    struct place at;
    uint32_t z = bits_of(x - p[MID * G]);
    float far = float_of(z | 0x80000000); /* -|x - mid| */
    at.low = -(z >> 31);
    UNROLLED for (int m = 0; m < E; m++)
        at.e[m] = power(far * p[(EXPONENT + m) * G], &at.less_one);
    return at;
}

/* Coefficients, exponentials and taus, counted from the winner. Two branches have the weights 1. */
#define FROM(row, k, last) chosen(at.low, p[((row) + (k)) * G], p[((row) + (last) - (k)) * G])
#define COEFFICIENT(row, k) (2 * (k) == K - 1 ? p[((row) + (k)) * G] : FROM(row, k, K - 1))
#define WEIGHT(row, k) (K == 2 && (row) == W ? 1.0f : COEFFICIENT(row, k))
#define NEAREST(m) ((m) < E ? (m) : T - 1 - (m))
#define STEP(m) (E < T ? at.e[NEAREST(m)] : E == 1 ? at.e[0] : chosen(at.low, at.e[m], at.e[E - 1 - (m)]))
#define RATE(m) (T == 1 ? 1.0f : E < T ? p[(TAU + (m)) * G] : FROM(TAU, m, T - 1))

/* The sum of coefficients times gates before they are divided by D, for either kind of branch. */
INLINE float mixed(int row, struct place at, const float *p, long G)
{
    if (GATE == CENTRED) /* w_win (1 - e) + (w_0 + w_1) e: opposite ones do not cancel near mid */
        return (p[row * G] + p[(row + 1) * G]) * at.e[0] - WEIGHT(row, 0) * at.less_one;
    float total = WEIGHT(row, K - 1);
    UNROLLED for (int k = K - 2; k >= 0; k--)
        total = total * STEP(k) + WEIGHT(row, k);
    return total;
}

/* How it moves with x, in the direction away from the winner; in units of tau where there is one. */
INLINE float moving(int row, struct place at, const float *p, long G)
{
    float total = WEIGHT(row, K - 1), move = 0.0f;
    UNROLLED for (int k = K - 2; k >= 0; k--) {
        move = STEP(k) * (move + RATE(k) * total);
        total = total * STEP(k) + WEIGHT(row, k);
    }
    return move;
}

INLINE float value(float x, const float *p, long G, int constants)
{
    struct place at = placed(x, p, G);
    float share = 1.0f / mixed(W, at, p, G);
    float y = x * (mixed(WS, at, p, G) * share);
    return constants ? y + mixed(WC, at, p, G) * share : y;
}

/* y of one tau and small weights: branches are counted from below on both sides, without a choice.
   Where the exponential stops growing, all branches but the last are below a unit in the last place
   of it (`fold`), so that far out y is the last branch there as well. */
INLINE float value_from_below(float x, const float *p, long G, int constants)
{
    const float top = 124.0f / J;
    float t = (x - p[MID * G]) * p[EXPONENT * G], unused;
    float e = power(t < top ? t : top, &unused);
    float D = p[(W + J) * G], S_ = p[(WS + J) * G], C_ = p[(WC + J) * G];
    UNROLLED for (int k = K - 2; k >= 0; k--) {
        D = D * e + p[(W + k) * G];
        S_ = S_ * e + p[(WS + k) * G];
        C_ = C_ * e + p[(WC + k) * G];
    }
    float share = 1.0f / D, y = x * (S_ * share);
    return constants ? y + C_ * share : y;
}

INLINE float derivative(float x, const float *p, long G, int constants)
{
    struct place at = placed(x, p, G);
    float share = 1.0f / mixed(W, at, p, G);
    float slope = mixed(WS, at, p, G) * share, turn;
    if (K == 2) {
        float apart = x * (p[(S + 1) * G] - p[S * G]);
        apart = constants ? apart + (p[(C + 1) * G] - p[C * G]) : apart;
        return slope + p[TAU * G] * (apart * (at.e[0] * share * share));
    }
    float grown = moving(W, at, p, G);
    turn = x * ((moving(WS, at, p, G) - slope * grown) * share);
    if (constants)
        turn += (moving(WC, at, p, G) - mixed(WC, at, p, G) * share * grown) * share;
    turn = T == 1 ? turn * p[TAU * G] : turn;
    return slope + float_of(bits_of(turn) ^ (~at.low & 0x80000000));
}

/* dx, and what this element adds to each sum, `stride` apart. T_m as in `tiles`. */
INLINE float gradients(float dy, float x, const float *p, long G, float *sums, long stride)
{
    struct place at = placed(x, p, G);
    float g[K], part = 1.0f, total = WEIGHT(W, 0), slope = 0.0f, turn[J], dx;
    g[0] = total;
    UNROLLED for (int k = 1; k < K; k++) {
        part *= STEP(k - 1);
        g[k] = part * WEIGHT(W, k);
        total += g[k];
    }
    float share = 1.0f / total;
    UNROLLED for (int k = 0; 2 * k < K; k++) { /* from now on in their own order */
        float near = g[k] * share, far = g[K - 1 - k] * share;
        g[k] = chosen(at.low, near, far);
        g[K - 1 - k] = chosen(at.low, far, near);
    }
    UNROLLED for (int k = 0; k < K; k++) {
        float weighed = g[k] * dy;
        slope += g[k] * p[(S + k) * G];
        sums[(SLOPE + k) * stride] += weighed * x;
        sums[(CONSTANT + k) * stride] += weighed;
    }
    dx = slope * dy;
    if (K == 2) {
        float apart = x * (p[(S + 1) * G] - p[S * G]) + (p[(C + 1) * G] - p[C * G]);
        turn[0] = g[0] * (g[1] * dy) * apart;
    } else {
        float values[K], below = g[0], sum = 0.0f, above[J], over[J];
        UNROLLED for (int k = 0; k < K; k++)
            values[k] = g[k] * (x * p[(S + k) * G] + p[(C + k) * G]);
        above[J - 1] = g[K - 1];
        over[J - 1] = values[K - 1];
        UNROLLED for (int m = J - 2; m >= 0; m--) {
            above[m] = above[m + 1] + g[m + 1];
            over[m] = over[m + 1] + values[m + 1];
        }
        UNROLLED for (int m = 0; m < J; m++) {
            below = m ? below + g[m] : below;
            sum += values[m];
            turn[m] = dy * (below * over[m] - above[m] * sum);
        }
    }
    UNROLLED for (int m = 0; m < J; m++) {
        int of = T == 1 ? 0 : m;
        sums[(TURN + m) * stride] += turn[m];
        sums[(MOVED + of) * stride] += turn[m] * (x - p[(THETA + m) * G]);
        dx += p[(TAU + of) * G] * turn[m];
    }
    return dx;
}

/* Work is cut into chunks that threads take one by one. x is memory (outer, G, inner). Where a group
   is a run of elements, a chunk is some runs next to each other, or a part of one, for some of the
   outer ones; where it is a column, a chunk is some columns of some rows. */
struct work {
    const char *x, *dy;
    char *out;
    const float *p;
    float *sums; /* (slots, SUMS, G), or NULL */
    long outer, G, inner, rows, groups, columns, blocks, pieces; /* `groups`: runs, 1 for columns */
    int type, constants, back; /* whether dx is asked for, not y */
    atomic_long next;
    atomic_int strange;
};

enum { FLOAT, BFLOAT, HALF };   /* types of x */
enum { LANES = 16, MOST = 1024 }; /* elements with sums of their own, and of 16 bits at once */

/* `count` elements next to each other; `lane` says whether each has parameters of its own, `seen`
   becomes NaN where a result is not finite. */
#define OVER(simd, seen, count, lane, result)                                       \
    _Pragma(simd)                                                                   \
    for (long i = 0; i < (count); i++) {                                            \
        const float *q = p + (lane) * i;                                            \
        float a = (result);                                                         \
        seen += a * 0.0f; /* NaN if a is infinite or NaN */                         \
        out[i] = a;                                                                 \
    }
#define EACH(count, lane, result) \
    OVER("omp simd reduction(+:poison)", poison, count, lane, result)
#define FROM_BELOW(constants) EACH(n, 0, value_from_below(x[i], q, 1, constants))
#define FORWARD(lane, constants) EACH(n, lane, value(x[i], q, G, constants))
#define BACKWARD(lane, constants) EACH(n, lane, dy[i] * derivative(x[i], q, G, constants))
#define ADDED(stride) gradients(dy[i], x[i], q, G, sums + i, stride)

static int run(const struct work *w, const float *restrict x, const float *restrict dy,
               float *restrict out, long n, const float *restrict p, int lane, float *restrict sums)
{
    const long G = lane ? w->G : 1, columns = w->columns;
    float poison = 0.0f;
    if (!w->back && GATE == ONE_TAU && !lane && p[SMALL] != 0.0f) {
        if (w->constants) { FROM_BELOW(1) }
        else { FROM_BELOW(0) }
    } else if (!w->back) {
        if (lane && w->constants) { FORWARD(1, 1) }
        else if (lane) { FORWARD(1, 0) }
        else if (w->constants) { FORWARD(0, 1) }
        else { FORWARD(0, 0) }
    } else if (w->sums == NULL) {
        if (lane && w->constants) { BACKWARD(1, 1) }
        else if (lane) { BACKWARD(1, 0) }
        else if (w->constants) { BACKWARD(0, 1) }
        else { BACKWARD(0, 0) }
    } else if (lane) {
        EACH(n, 1, ADDED(columns))
    } else {
        /* `poison` for each lane: gcc adds the lanes of one sum up one after the other, which for a
           single vector takes longer than its gates */
        float each[LANES] = {0.0f};
        for (; n > 0; n -= LANES, x += LANES, dy += LANES, out += LANES) {
            if (n >= LANES) { OVER("omp simd", each[i], LANES, 0, ADDED(LANES)) }
            else { OVER("omp simd", each[i], n, 0, ADDED(LANES)) }
        }
        for (int i = 0; i < LANES; i++)
            poison += each[i];
    }
    return poison != 0.0f;
}

static void widened(int type, const char *from, long n, float *to)
{
    const uint16_t *bits = (const uint16_t *)from;
    if (type == BFLOAT) {
        for (long i = 0; i < n; i++)
            to[i] = float_of((uint32_t)bits[i] << 16);
    } else {
#ifdef __FLT16_MAX__
        UNROLLED for (long i = 0; i < n; i++)
            to[i] = (float)((const _Float16 *)from)[i];
#endif
    }
}

static void narrowed(int type, const float *from, long n, char *to)
{
    if (type == BFLOAT) {
        for (long i = 0; i < n; i++) { /* to the nearest, of two to the even one; there is no NaN */
            uint32_t bits = bits_of(from[i]);
            ((uint16_t *)to)[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
        }
    } else {
#ifdef __FLT16_MAX__
        UNROLLED for (long i = 0; i < n; i++)
            ((_Float16 *)to)[i] = (_Float16)from[i];
#endif
    }
}

/* Whether this compiler has numbers of 16 bits. */
int has_half(void)
{
#ifdef __FLT16_MAX__
    return 1;
#else
    return 0;
#endif
}

/* `run` from element `start` on, of any type. */
static int stretch(const struct work *w, long start, long n, const float *p, int lane, float *sums)
{
    int strange = 0;
    float x[MOST], dy[MOST], out[MOST];
    const char *slopes = w->back ? w->dy : w->x;
    if (w->type == FLOAT)
        return run(w, (const float *)w->x + start, (const float *)slopes + start,
                   (float *)w->out + start, n, p, lane, sums);
    for (long at = 0, count; at < n; at += count) {
        count = n - at < MOST ? n - at : MOST;
        long byte = 2 * (start + at);
        widened(w->type, w->x + byte, count, x);
        if (w->back)
            widened(w->type, w->dy + byte, count, dy);
        strange |= run(w, x, dy, out, count, lane ? p + at : p, lane, lane ? sums + at : sums);
        narrowed(w->type, out, count, w->out + byte);
    }
    return strange;
}

static int chunk(const struct work *w, long at)
{
    long block = at / w->pieces, piece = at % w->pieces;
    int lane = w->inner == 1 && w->G > 1, strange = 0;
    long spans = lane ? 1 : (w->G - 1) / w->groups + 1, group = block % spans * w->groups;
    long groups = w->G - group < w->groups ? w->G - group : w->groups;
    block /= spans;
    long first = block * w->rows, last = first + w->rows;
    last = last < w->outer ? last : w->outer;
    long width = lane ? w->G : w->inner, from = piece * w->columns;
    long n = width - from < w->columns ? width - from : w->columns;
    long room = w->sums == NULL ? 0 : SUMS * (lane ? w->columns : LANES);
    /* Whole lines of the cache: where the stack happens to lie so that one of these vectors spans two
       pages, all of it takes three times as long. */
    __attribute__((aligned(64))) float sums[groups * room + 1];
    float folded[groups * ROWS];
    for (long g = 0; g < groups; g++)
        for (int row = 0; row < ROWS; row++)
            folded[g * ROWS + row] = w->p[row * w->G + group + g];
    memset(sums, 0, sizeof sums);
    for (long o = first; o < last; o++) {
        /* as memory lies: where a run of 4 KB is followed by one far away, memory is slower than the
           gates */
        for (long g = 0; g < groups; g++) {
            long start = lane ? o * w->G : (o * w->G + group + g) * w->inner;
            const float *p = lane ? w->p + from : folded + g * ROWS;
            strange |= stretch(w, start + from, n, p, lane, sums + g * room);
        }
    }
    if (w->sums == NULL)
        return strange;
    for (int row = 0; row < SUMS; row++) {
        if (lane) {
            for (long i = 0; i < n; i++)
                strange |= is_strange(sums[row * w->columns + i]);
            memcpy(w->sums + (block * SUMS + row) * w->G + from, sums + row * w->columns, n * 4);
            continue;
        }
        float *to = w->sums + ((block * w->pieces + piece) * SUMS + row) * w->G + group;
        for (long g = 0; g < groups; g++) {
            const float *lanes = sums + g * room + row * LANES;
            double total = 0.0;
            _Pragma("omp simd reduction(+:total)")
            for (int i = 0; i < LANES; i++)
                total += lanes[i];
            to[g] = (float)total;
            strange |= is_strange(to[g]);
        }
    }
    return strange;
}

static void take_chunks(void *shared)
{
    struct work *w = shared;
    for (;;) {
        long at = atomic_fetch_add(&w->next, 1);
        if (at >= w->blocks * w->pieces)
            return;
        if (chunk(w, at))
            atomic_store(&w->strange, 1);
    }
}

/* The gradients of the parameters (rows, G) from the sums of all slots, in double; `grads` are those
   of tau, theta, s and c, NULL for one that nobody wants. */
static void finish(const struct work *w, long slots, float *const *grads)
{
    const int first[] = {MOVED, TURN, SLOPE, CONSTANT};
    for (int row = 0; row < SUMS; row++) {
        int of = (row >= TURN) + (row >= SLOPE) + (row >= CONSTANT);
        for (long g = 0; grads[of] != NULL && g < w->G; g++) {
            double total = 0.0, factor = 1.0;
            for (long slot = 0; slot < slots; slot++)
                total += w->sums[(slot * SUMS + row) * w->G + g];
            if (row < TURN)
                factor = w->p[(CHAIN + row - MOVED) * w->G + g];
            else if (row < SLOPE)
                factor = -w->p[(TAU + (T == 1 ? 0 : row - TURN)) * w->G + g];
            grads[of][(row - first[of]) * w->G + g] = (float)(factor * total);
        }
    }
}

typedef void team(void (*)(void *), void *, unsigned, unsigned);

enum { FEW = 16384 }; /* sums that fit the stack; one_pass._FEW_SUMS */

/* y, or with `back` dx, and with slots for sums in `sizes` the gradients of the parameters as well,
   for which `sums` is room, needed only for more than FEW. Threads are those of `start`:
   GOMP_parallel of the OpenMP that torch has loaded. Gives 1 if a value is not finite, or where a tensor turns out to have no memory. */
int blend(const void *x, const void *dy, void *out, const float *p, float *sums, float *dtau,
          float *dtheta, float *ds, float *dc, const long *sizes, int type, int constants, int back,
          unsigned threads, team *start)
{
    const long slots = sizes[8], count = slots * SUMS * sizes[1];
    if (x == NULL || out == NULL || (back && dy == NULL) || (sums == NULL && count > FEW))
        return 1;
    float *const grads[] = {dtau, dtheta, ds, dc};
    float room[sums == NULL ? count + 1 : 1];
    sums = slots == 0 ? NULL : sums == NULL ? room : sums;
    struct work w = {x, dy, out, p, sums, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],
                     sizes[5], sizes[6], sizes[7], type, constants, back};
    if (threads > 1)
        start(take_chunks, &w, threads, 0);
    else
        take_chunks(&w);
    if (slots > 0)
        finish(&w, slots, grads);
    return w.strange;
}

/* Groups that `fold` takes at once, row by row, so that a compiler makes vectors of all but exp. */
enum { BLOCK = 64 };

/* A row of a parameter in double: the known number, or what the tensor has; NaN without either. */
INLINE void row_of(double *to, const float *tensor, double known, long n)
{
    int read = isnan(known) && tensor != NULL;
    for (long g = 0; g < n; g++)
        to[g] = read ? tensor[g] : known;
}

/* Whether branches can be counted from below everywhere (weights._are_small): what is left of a
   branch where the exponential stops growing is no more than a unit in the last place of the last. */
INLINE int are_small(double w[K][BLOCK], double s[K][BLOCK], double c[K][BLOCK], long g)
{
    double left = exp2(-124.0), unit = exp2(-23.0);
    int small = 1;
    for (int k = 0; k < K; k++, left *= exp2(124.0 / J)) {
        double slope = fabs(s[k][g]), constant = fabs(c[k][g]), rest = left * w[k][g];
        if (k < K - 1)
            small = small && rest <= exp2(-24.0) && rest * slope <= unit * fabs(s[J][g])
                    && rest * constant <= unit * fabs(c[J][g]);
        small = small && slope <= 2.0 && constant <= 2.0;
    }
    return small;
}

/* Parameters as they are read above, from what a module holds (G numbers a row, NULL for nothing):
   tau = tau0 exp(rho), theta = theta0 + dtheta, s, c; `known` has a number for each row of tau,
   theta, s and c that is none of a tensor's, else NaN. Gives the largest size of a weight's exponent,
   to base 2; NaN where a tau is not positive or a number is not finite in float32. */
double fold(const float *rho, const float *dtheta, const float *s, const float *c, const float *tau0,
            const float *theta0, const double *known, long G, float *p)
{
    const double log2e = 1.4426950408889634, bound = 7.0; /* structure.rho_bound */
    double largest = 0.0;
    int bad = 0;
    for (long from = 0; from < G; from += BLOCK) {
        long n = G - from < BLOCK ? G - from : BLOCK;
        double tau[T][BLOCK], theta[J][BLOCK], slope[K][BLOCK], constant[K][BLOCK], w[K][BLOCK];
        double mid[BLOCK] = {0.0}, sharp[BLOCK] = {0.0}, weight[BLOCK] = {0.0};
#define READ(to, tensor, row, m) \
    row_of(to[m], (tensor) == NULL ? NULL : (tensor) + (m) * G + from, known[(row) + (m)], n)
#define ALL for (long g = 0; g < n; g++)
#define TO(row, m) p[((row) + (m)) * G + from + g]
        for (int m = 0; m < T; m++) {
            READ(tau, tau0, 0, m);
            if (rho == NULL) {
                ALL TO(CHAIN, m) = 1.0f;
            } else {
                const float *r = rho + m * G + from;
                ALL tau[m][g] *= exp(r[g] < -bound ? -bound : r[g] > bound ? bound : r[g]);
                ALL TO(CHAIN, m) = fabs(r[g]) <= bound ? (float)tau[m][g] : 0.0f;
            }
            ALL TO(TAU, m) = (float)tau[m][g];
            ALL TO(EXPONENT, m) = (float)(tau[m][g] * log2e);
            ALL bad |= !(tau[m][g] > 0);
        }
        for (int m = 0; m < J; m++) {
            const double *t = tau[T == 1 ? 0 : m];
            READ(theta, theta0, T, m);
            if (dtheta != NULL)
                ALL theta[m][g] += dtheta[m * G + from + g];
            ALL TO(THETA, m) = (float)theta[m][g];
            ALL mid[g] += t[g] * theta[m][g];
            ALL sharp[g] += t[g];
        }
        ALL mid[g] = TO(MID, 0) = (float)(mid[g] / sharp[g]);
        for (int k = 0; k < K; k++) {
            READ(slope, s, T + J, k);
            READ(constant, c, T + J + K, k);
            if (k > 0)
                ALL weight[g] -= tau[T == 1 ? 0 : k - 1][g] * (theta[k - 1][g] - mid[g]) * log2e;
            /* 0 but for the rounding of mid, which is seen where tau mid is large; two gates have
               theta as float32 for their mid */
            if (k == K - 1)
                ALL weight[g] = K == 2 || fabs(weight[g]) < exp2(-21.0) ? 0.0 : weight[g];
            ALL bad |= isnan(weight[g]);
            ALL largest = fabs(weight[g]) > largest ? fabs(weight[g]) : largest;
            ALL w[k][g] = K == 2 ? 1.0 : exp2(weight[g]);
            ALL TO(W, k) = (float)w[k][g];
            ALL TO(S, k) = (float)slope[k][g];
            ALL TO(C, k) = (float)constant[k][g];
            ALL TO(WS, k) = (float)(w[k][g] * slope[k][g]);
            ALL TO(WC, k) = (float)(w[k][g] * constant[k][g]);
        }
        ALL TO(SMALL, 0) = GATE == ONE_TAU && are_small(w, slope, constant, g);
        for (int row = 0; row < ROWS; row++)
            ALL bad |= is_strange(TO(row, 0));
    }
    return bad ? NAN : largest;
}

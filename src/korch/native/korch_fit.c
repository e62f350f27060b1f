/* Runs a model at the sizes of its inputs: chooses a plan, pads the inputs, computes what else the plan reads, and cuts the
 * outputs. `sizes.bin` says how, in numbers of 64 bits that `korch.runtime.sizes` writes. A list of them is preceded by its
 * length. A read function takes the address of its place in them, and moves it behind what it has read. */
#include "korch_runtime.h"

#include <math.h>

enum { MOST_AXES = 64 };

typedef const int64_t *numbers;

/* A part of a tensor: the bytes from `at` on that follow `before` bytes of its other parts. */
typedef struct {
    int64_t at, before, size;
} span;

/* A tensor of the plan, and its spans that the user's tensor has. Without memory of its own, it is the user's tensor. */
typedef struct {
    char *memory;
    span *spans;
    int64_t count;
    bool is_whole;
    int64_t shape[MOST_AXES]; /* of the user's tensor */
} padded;

/* A plan that has been used, and its inputs, the user's first, and outputs. */
typedef struct {
    const korch_plan *plan;
    korch_handle *handle;
    int64_t given; /* the number of the user's inputs */
    padded *inputs, *outputs;
    korch_tensor *results;
    const void **reads;
    void **writes;
} used;

struct korch_session {
    const korch_model *model;
    int threads;
    used *plans, *fitted;
    int64_t *sizes;
};

static double as_double(int64_t bits) {
    double found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

/* An extent: the dimension, `times`, `plus`, `over` and `step`, as in `korch.ranges.form`. */
static int64_t read_extent(numbers *at, const int64_t *sizes) {
    const numbers own = *at;
    *at += 5;
    const int64_t found = floor_div((own[1] ? own[1] * sizes[own[0]] : 0) + own[2], own[3]);
    return -floor_div(-found, own[4]) * own[4];
}

/* A list of factors: write to `out`, for each element, whether the model has it, and to `counts` how many each factor has in
 * the model; return the number of elements. A factor is its size and its parts, each a list; without parts, an extent. */
static int64_t read_valid(numbers *at, const int64_t *sizes, char *out, int64_t *counts) {
    int64_t n = 1;
    out[0] = 1;
    for (int64_t k = *(*at)++; k > 0; --k) {
        const int64_t size = *(*at)++, parts = *(*at)++;
        char *const line = calloc((size_t)size + 1, 1);
        int64_t ends = 0, count = 0;
        for (int64_t p = 0; p < parts; ++p) ends += read_valid(at, sizes, line + ends, NULL);
        if (!parts) {
            const int64_t valid = read_extent(at, sizes);
            memset(line, 1, (size_t)(valid < 0 ? 0 : valid < size ? valid : size));
        }
        for (int64_t i = 0; i < size; ++i) count += line[i];
        if (counts) *counts++ = count;
        for (int64_t i = n; i-- > 0;)
            if (out[i]) memcpy(out + i * size, line, (size_t)size);
            else memset(out + i * size, 0, (size_t)size);
        n *= size;
        free(line);
    }
    return n;
}

/* Which elements of an input or output the model has: the bytes of a group of elements that are all valid or not, room for
 * the number of groups, and the factors of the groups, which are the first axes. */
static void read_spans(numbers *at, const int64_t *sizes, padded *own) {
    const int64_t unit = *(*at)++, room = *(*at)++;
    char *const valid = calloc((size_t)room + 1, 1);
    const int64_t n = read_valid(at, sizes, valid, own->shape);
    own->spans = realloc(own->spans, (size_t)(n + 1) * sizeof(span));
    own->count = 0;
    int64_t before = 0;
    for (int64_t i = 0; i < n;) {
        const char *const begin = memchr(valid + i, 1, (size_t)(n - i));
        if (!begin) break;
        const char *const end = memchr(begin, 0, (size_t)(valid + n - begin));
        i = end ? end - valid : n;
        own->spans[own->count++] = (span){(begin - valid) * unit, before, (i - (begin - valid)) * unit};
        before += (i - (begin - valid)) * unit;
    }
    own->is_whole = before == n * unit;
    free(valid);
}

/* The bits of a float16, rounded to even. A conversion by the compiler would bring functions that hide those of libm. */
static uint16_t half_of(double x) {
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    int exponent;
    if (x != x) return 0x7e00;
    if (fabs(x) >= 65520) return sign | 0x7c00;
    frexp(x, &exponent);
    if (exponent < -13 || x == 0) exponent = -13;
    return (uint16_t)(sign | ((exponent + 13) * 1024 + (int)lrint(ldexp(fabs(x), 11 - exponent))));
}

static void put(char *out, const char *dtype, int64_t i, double x) {
    const float single = (float)x;
    const int64_t whole = (int64_t)x;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    if (strcmp(dtype, "f64") == 0) ((double *)out)[i] = x;
    else if (strcmp(dtype, "f32") == 0) ((float *)out)[i] = single;
    else if (strcmp(dtype, "f16") == 0) ((uint16_t *)out)[i] = half_of(x);
    else if (strcmp(dtype, "bf16") == 0) ((uint16_t *)out)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    else if (strstr(dtype, "64")) ((int64_t *)out)[i] = whole;
    else if (strstr(dtype, "32")) ((int32_t *)out)[i] = (int32_t)whole;
    else if (strstr(dtype, "16")) ((int16_t *)out)[i] = (int16_t)whole;
    else out[i] = (char)whole;
}

/* Places along an axis, as in `korch.ranges.form.Places`. */
static void read_places(numbers *at, const int64_t *sizes, int64_t *out, int64_t count) {
    enum { EDGE, REFLECT, WRAP, ENDS };
    const int64_t mode = *(*at)++, step = *(*at)++, has_out = *(*at)++;
    const int64_t start = read_extent(at, sizes), size = read_extent(at, sizes), outs = read_extent(at, sizes);
    for (int64_t i = 0; i < count; ++i) {
        int64_t place = start + step * (has_out ? i * size / outs : i);
        if (mode == ENDS) place = i < size - start ? i : i + count - size < count - 1 ? i + count - size : count - 1;
        else if (mode == EDGE || size < 2) place = place >= size ? size - 1 : place;
        else if (mode == WRAP) place -= floor_div(place, size) * size;
        else {
            place -= floor_div(place, 2 * size - 2) * (2 * size - 2);
            place = place < size ? place : 2 * size - 2 - place;
        }
        out[i] = place > 0 ? place : 0;
    }
}

/* What a plan reads besides the user's inputs, as in `korch.ranges.form.Hidden`: its kind, and what that needs. `out` has zeros. */
static void read_hidden(numbers *at, const int64_t *sizes, const korch_tensor *what, char *out) {
    enum { MASK, ORDER, END, NUMBER, PLACES, TABLE, SIZES };
    int64_t count = 1, found = 0, *const whole = (int64_t *)out;
    for (int64_t i = 0; i < what->rank; ++i) count *= what->shape[i];
    const int64_t kind = *(*at)++;
    if (kind == MASK || kind == ORDER) {
        char *const valid = malloc((size_t)*(*at)++ + 1);
        read_valid(at, sizes, valid, NULL);
        for (int64_t i = 0; i < count; ++i)
            if (kind == MASK) ((float *)out)[i] = valid[i];
            else if (valid[i]) whole[found++] = i;
        free(valid);
    } else if (kind == END) {
        const int64_t offset = *(*at)++, valid = read_extent(at, sizes);
        for (int64_t i = 0; i < count; ++i) ((float *)out)[i] = i == valid - 1 - offset;
    } else if (kind == NUMBER) {
        const double coefficient = as_double(*(*at)++), power = as_double(*(*at)++);
        double product = 1;
        for (int64_t k = *(*at)++; k > 0; --k) product *= (double)read_extent(at, sizes);
        for (int64_t i = 0; i < count; ++i) put(out, what->dtype, i, coefficient * pow(product, power));
    } else if (kind == PLACES) {
        read_places(at, sizes, whole, count);
    } else if (kind == TABLE) {
        const int64_t dimension = *(*at)++, low = *(*at)++, row = sizes[dimension] - low, rows = *(*at)++;
        for (int64_t i = 0; row >= 0 && row < rows && i < count; ++i)
            put(out, what->dtype, i, as_double((*at)[row * count + i]));
        *at += rows * count;
    } else {
        for (int64_t i = 0; i < count; ++i) whole[i] = sizes[i];
    }
}

/* The cost of a plan at some sizes, as `korch.ranges.cost` computes it. */
static double read_cost(numbers *at, const int64_t *sizes, int64_t dimensions) {
    double total = 0;
    for (int64_t k = *(*at)++; k > 0; --k) {
        const int64_t step = *(*at)++;
        const double low = as_double(*(*at)++), high = as_double(*(*at)++);
        const numbers scales = *at;
        *at += dimensions;
        double sums[2] = {0, 1};
        for (int below = 0; below < 2; ++below) {
            for (int64_t terms = *(*at)++; terms > 0; --terms) {
                double term = 1;
                for (int64_t d = 0; d < dimensions; ++d)
                    for (int64_t e = *(*at)++; e > 0; --e)
                        term *= (double)(-floor_div(-sizes[d], step) * step) / (double)scales[d];
                sums[below] += as_double(*(*at)++) * term;
            }
        }
        const double cost = sums[1] > 0 ? sums[0] / sums[1] : INFINITY;
        total += cost < low ? low : cost > high ? high : cost;
    }
    return total;
}

/* Read the sizes of the inputs from their shapes; return whether a plan takes them. For each axis of each input, there are the
 * dimension or -1, by what its size is multiplied, and its least and its greatest size. */
static bool read_sizes(numbers *at, korch_session *s, const korch_tensor *inputs, const int64_t *const *shapes,
                       int64_t dimensions, char *error, size_t error_size) {
    bool fits = true;
    for (int64_t d = 0; d < dimensions; ++d) s->sizes[d] = -1;
    for (int64_t count = *(*at)++, i = 0; i < count; ++i)
        for (int64_t rank = *(*at)++, a = 0; a < rank; ++a) {
            const int64_t d = *(*at)++, own = shapes[i][a];
            const long long step = *(*at)++, low = *(*at)++, high = *(*at)++, steps = own / step;
            const bool is_same = d < 0 || s->sizes[d] < 0 || s->sizes[d] == steps;
            if (fits && (steps < low || steps > high || own % step || !is_same)) {
                const int n = snprintf(error, error_size, "input %s, axis %d: its size is %lld; expected %lld", inputs[i].name,
                                       (int)a, (long long)own, low * step);
                if (d >= 0 && n > 0 && (size_t)n < error_size)
                    snprintf(error + n, error_size - (size_t)n, " to %lld in steps of %lld%s", high * step, step,
                             is_same ? "" : ", as another axis has");
                fits = false;
            }
            if (d >= 0) s->sizes[d] = steps;
        }
    return fits;
}

/* Find the plan that is given for the sizes of the inputs, or else the one with the least cost. Return its number, and the place
 * of its description, or -1. */
static int64_t choose(korch_session *s, const int64_t *const *shapes, numbers *chosen, char *error, size_t error_size) {
    numbers at = s->model->numbers;
    const int64_t dimensions = *at++;
    double best_cost = INFINITY;
    int64_t best = -1;
    for (int64_t i = *at++, plan; i > 0; --i) {
        const numbers next = at + at[0];
        plan = at[1];
        const bool is_exact = at[2];
        const numbers sizes = at + 3;
        at = sizes + dimensions;
        const korch_tensor *const inputs = s->model->plans->rows[plan]->inputs.rows;
        bool serves = read_sizes(&at, s, inputs, shapes, dimensions, error, error_size);
        for (int64_t d = 0; d < dimensions; ++d) serves &= is_exact ? s->sizes[d] == sizes[d] : s->sizes[d] <= sizes[d];
        if (serves) {
            double cost = read_cost(&at, s->sizes, dimensions);
            for (int64_t k = *at++; k > 0; --k, at += dimensions)
                if (memcmp(at, s->sizes, (size_t)dimensions * sizeof *at) == 0) cost = -INFINITY;
            if (cost < best_cost) best_cost = cost, best = plan, *chosen = at;
        }
        at = next;
    }
    return best;
}

static void release(used *own) {
    korch_destroy(own->handle);
    for (int64_t i = 0; own->inputs && i < own->plan->inputs.count + own->plan->outputs.count; ++i) {
        free(own->inputs[i].memory);
        free(own->inputs[i].spans);
    }
    free(own->inputs);
    free(own->results);
    free(own->reads);
    *own = (used){0};
}

KORCH_API void korch_stop(korch_session *s) {
    if (!s) return;
    for (int64_t i = 0; s->plans && i < s->model->plans->count; ++i) release(&s->plans[i]);
    free(s->plans);
    free(s->sizes);
    free(s);
}

KORCH_API korch_session *korch_start(const korch_model *model, int threads, char *error, size_t error_size) {
    korch_session *const s = calloc(1, sizeof *s);
    if (s) {
        *s = (korch_session){.model = model, .threads = threads};
        s->plans = calloc((size_t)model->plans->count + 1, sizeof *s->plans);
        s->sizes = calloc((size_t)model->numbers[0] + 1, sizeof *s->sizes);
        if (s->plans && s->sizes) return s;
    }
    snprintf(error, error_size, "out of memory");
    korch_stop(s);
    return NULL;
}

/* Make what running a plan needs; return whether there is memory for it. */
static bool prepare(korch_session *s, int64_t number, char *error, size_t error_size) {
    used *const own = &s->plans[number];
    if (own->handle) return true;
    const korch_plan *const plan = own->plan = s->model->plans->rows[number];
    const size_t inputs = (size_t)plan->inputs.count, outputs = (size_t)plan->outputs.count;
    own->inputs = calloc(inputs + outputs + 1, sizeof *own->inputs);
    own->results = calloc(outputs + 1, sizeof *own->results);
    own->reads = calloc(inputs + outputs + 1, sizeof(void *));
    own->outputs = own->inputs + inputs;
    own->writes = (void **)own->reads + inputs;
    int64_t first = 0; /* of its constants */
    for (int64_t i = 0; i < number; ++i) first += s->model->plans->rows[i]->constants.count;
    if (own->inputs && own->results && own->reads)
        own->handle = korch_create(plan, s->model->constants + first, s->threads, error, error_size);
    else snprintf(error, error_size, "out of memory");
    if (own->handle) return true;
    release(own);
    return false;
}

/* Read how a tensor of a plan depends on the sizes; compute it if it is not the user's. */
static void fit(numbers *at, const int64_t *sizes, const korch_tensor *what, padded *own, bool is_hidden) {
    memcpy(own->shape, what->shape, (size_t)what->rank * sizeof *own->shape);
    if (!is_hidden) read_spans(at, sizes, own);
    if (own->is_whole) return;
    if (!own->memory) own->memory = korch_allocate(what->size_bytes);
    else memset(own->memory, 0, (size_t)what->size_bytes);
    if (is_hidden) read_hidden(at, sizes, what, own->memory);
}

KORCH_API const korch_tensor *korch_fit(korch_session *s, const int64_t *const *shapes, char *error, size_t error_size) {
    numbers at = NULL;
    const int64_t number = choose(s, shapes, &at, error, error_size);
    s->fitted = NULL;
    if (number < 0 || !prepare(s, number, error, error_size)) return NULL;
    used *const own = &s->plans[number];
    const korch_plan *const plan = own->plan;
    own->given = *at++;
    for (int64_t i = 0; i < plan->inputs.count; ++i)
        fit(&at, s->sizes, &plan->inputs.rows[i], &own->inputs[i], i >= own->given);
    for (int64_t i = 0; i < plan->outputs.count; ++i) {
        padded *const output = &own->outputs[i];
        fit(&at, s->sizes, &plan->outputs.rows[i], output, false);
        const span *const last = output->spans + output->count - 1;
        own->results[i] = plan->outputs.rows[i];
        own->results[i].shape = output->shape;
        own->results[i].size_bytes = output->count ? last->before + last->size : 0;
    }
    s->fitted = own;
    if (error_size) error[0] = 0; /* a plan that does not take the shapes may have left a message */
    return own->results;
}

/* Copy a user's tensor to one of the plan's size, or back. */
static void *move(const padded *tensor, void *user, bool is_back) {
    for (int64_t i = 0; !tensor->is_whole && i < tensor->count; ++i) {
        const span *const own = &tensor->spans[i];
        char *const there = tensor->memory + own->at, *const here = (char *)user + own->before;
        memcpy(is_back ? here : there, is_back ? there : here, (size_t)own->size);
    }
    return tensor->is_whole ? user : tensor->memory;
}

KORCH_API int korch_serve(korch_session *s, const void *const *inputs, void *const *outputs) {
    used *const own = s->fitted;
    const int64_t count = own->plan->outputs.count;
    for (int64_t i = 0; i < own->plan->inputs.count; ++i)
        own->reads[i] = i < own->given ? move(&own->inputs[i], (void *)inputs[i], false) : own->inputs[i].memory;
    for (int64_t i = 0; i < count; ++i) own->writes[i] = own->outputs[i].is_whole ? outputs[i] : own->outputs[i].memory;
    const int failed = korch_run(own->handle, own->reads, own->writes);
    for (int64_t i = 0; i < count; ++i) move(&own->outputs[i], outputs[i], true);
    return failed;
}

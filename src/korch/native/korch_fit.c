/* Runs a model at the sizes of its inputs, in parts if it has states: chooses a plan, pads the inputs, computes what else the
 * plan reads, and cuts the outputs. `sizes.bin` says how, in numbers of 64 bits that `korch.runtime.sizes` writes. A list of
 * them is preceded by its length. A read function takes the address of its place in them, and moves it behind what it has
 * read. */
#include "korch_runtime.h"

#include <math.h>

enum { MOST_AXES = 64 };

typedef const int64_t *numbers;

/* A part of a tensor: the bytes from `at` on that follow `before` bytes of its other parts. */
typedef struct {
    int64_t at, before, size;
} span;

/* A tensor of the plan, and its spans that the user's tensor has. Without memory of its own, it is the user's tensor, or the
 * memory of a state (`is_kept`), with this number. Of this tensor, `part` bytes from `first` on are read or written, and those
 * after each further `whole` bytes. */
typedef struct {
    char *memory;
    span *spans;
    int64_t count;
    bool is_whole, is_kept;
    int64_t number, part, whole, first;
    int64_t shape[MOST_AXES]; /* of the user's tensor */
} padded;

/* A plan that has been used, and its inputs, the user's first, and outputs. */
typedef struct {
    const korch_plan *plan;
    korch_handle *handle;
    int64_t given; /* the number of the user's inputs and of states */
    padded *inputs, *outputs;
    korch_tensor *results;
    const void **reads;
    void **writes;
} used;

/* The beginning of `sizes.bin`; states follow. */
typedef struct {
    int64_t forms, dimensions, capacity, rows, is_causal, states;
} about;

/* A state: its number of groups of rows, and the bytes of a row. */
typedef struct {
    int64_t groups, row_bytes;
} kept;

struct korch_session {
    const korch_model *model;
    const about *about;
    const kept *kept;
    int threads;
    used *plans, *fitted;
    int64_t *sizes; /* of a part: of each dimension; with states, of all rows, and of new rows */
    char **states; /* tests read them at this place */
    int64_t length, rows; /* the rows of the states, and the new ones of a run */
    int64_t begun;        /* `length` at the begin of a run */
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

/* Factors: write to `out`, of which bytes behind are used, too, which elements the model has, and to `counts` how many of each
 * factor; return the number of elements. A factor is its size and its parts, each a list; without parts, an extent. */
static int64_t read_valid(numbers *at, const int64_t *sizes, char *out, int64_t *counts) {
    int64_t n = 1;
    out[0] = 1;
    for (int64_t k = *(*at)++; k > 0; --k) {
        const int64_t size = *(*at)++, parts = *(*at)++;
        char *const line = out + n * size;
        int64_t ends = 0, count = 0;
        for (int64_t p = 0; p < parts; ++p) ends += read_valid(at, sizes, line + ends, NULL);
        if (!parts) {
            const int64_t valid = read_extent(at, sizes);
            ends = valid < 0 ? 0 : valid < size ? valid : size;
            memset(line, 1, (size_t)ends);
        }
        memset(line + ends, 0, (size_t)(size - ends));
        for (int64_t i = 0; i < size; ++i) count += line[i];
        if (counts) *counts++ = count;
        for (int64_t i = n; i-- > 0;)
            if (out[i]) memcpy(out + i * size, line, (size_t)size);
            else memset(out + i * size, 0, (size_t)size);
        n *= size;
    }
    return n;
}

/* Which elements of an input or output the model has: the bytes of a group of elements that are all valid or not, room to
 * read the groups, and their factors, which are the first axes. Return whether there is memory. */
static bool read_spans(numbers *at, const int64_t *sizes, padded *own) {
    const int64_t unit = *(*at)++, room = *(*at)++;
    char *const valid = malloc((size_t)room);
    if (!own->spans) own->spans = malloc((size_t)room * sizeof *own->spans);
    const bool has_memory = valid && own->spans;
    const int64_t n = has_memory ? read_valid(at, sizes, valid, own->shape) : 0;
    int64_t before = own->count = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (!valid[i]) continue;
        if (!i || !valid[i - 1]) own->spans[own->count++] = (span){i * unit, before, 0};
        own->spans[own->count - 1].size += unit;
        before += unit;
    }
    own->is_whole = before == n * unit;
    free(valid);
    return has_memory;
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

/* Write what a plan reads besides inputs (`korch.ranges.form.Hidden`) over zeros; return whether there is memory to do it. */
static bool read_hidden(numbers *at, const int64_t *sizes, const korch_tensor *what, char *out) {
    enum { MASK, ORDER, END, NUMBER, PLACES, TABLE, SIZES };
    int64_t count = 1, found = 0, *const whole = (int64_t *)out;
    for (int64_t i = 0; i < what->rank; ++i) count *= what->shape[i];
    const int64_t kind = *(*at)++;
    if (kind == MASK || kind == ORDER) {
        char *const valid = malloc((size_t)*(*at)++);
        if (!valid) return false;
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
    return true;
}

/* Read the sizes of the inputs from their shapes; return whether they are right. For each input, there is its number in the
 * plans, and for each axis, the dimension or -1, by what its size is multiplied, and its least and its greatest size. */
static bool read_sizes(numbers *at, korch_session *s, const int64_t *const *shapes, char *error, size_t error_size) {
    const korch_tensor *const inputs = s->model->plans->rows[0]->inputs.rows;
    bool fits = true;
    for (int64_t d = 0; d <= s->about->dimensions; ++d) s->sizes[d] = -1;
    for (int64_t count = *(*at)++, i = 0; i < count; ++i) {
        const char *const name = inputs[*(*at)++].name;
        for (int64_t rank = *(*at)++, a = 0; a < rank; ++a) {
            const int64_t d = *(*at)++, own = shapes[i][a];
            const long long step = *(*at)++, low = *(*at)++, high = *(*at)++, steps = own / step;
            const bool is_same = d < 0 || s->sizes[d] < 0 || s->sizes[d] == steps;
            if (fits && (steps < low || steps > high || own % step || !is_same)) {
                const int n = snprintf(error, error_size, "input %s, axis %d: its size is %lld; expected %lld", name, (int)a,
                                       (long long)own, low * step);
                if (d >= 0 && n > 0 && (size_t)n < error_size)
                    snprintf(error + n, error_size - (size_t)n, " to %lld in steps of %lld%s", high * step, step,
                             is_same ? "" : ", as another axis has");
                fits = false;
            }
            if (d >= 0) s->sizes[d] = steps;
        }
    }
    return fits;
}

/* Return the description of the plan for the sizes. There are the least and the number of sizes of each dimension, and runs of
 * plans in the order of all sizes. */
static numbers read_choice(numbers at, const korch_session *s) {
    int64_t place = 0;
    for (int64_t d = 0; d < s->about->dimensions; ++d, at += 2) place = place * at[1] + s->sizes[d] - at[0];
    for (int64_t left = *at++; left > 1 && at[2] <= place; --left) at += 2;
    return s->model->numbers + at[1];
}

/* Return the description of the plan for the shapes of the inputs, or, if there are none, for the first of `rows` rows, whose
 * number is then in the sizes; null if there is none. A plan for first rows has a least number of them. */
static numbers choose(korch_session *s, const int64_t *const *shapes, int64_t rows, char *error, size_t error_size) {
    numbers form = s->model->numbers + s->about->forms;
    for (int64_t left = *form++; left > 0; --left, form += *form) {
        const int64_t follows = form[1], least = form[follows ? 2 : form[3]];
        numbers at = form + 4;
        if (shapes ? !read_sizes(&at, s, shapes, error, error_size) : follows != (s->length > 0) || rows < least) continue;
        if (!shapes) s->sizes[0] = s->length + (s->sizes[1] = rows < form[2] ? rows : form[2]);
        return read_choice(form + form[3], s);
    }
    return NULL;
}

static void release(used *own) {
    korch_destroy(own->handle);
    for (int64_t i = 0; own->inputs && i < own->plan->inputs.count + own->plan->outputs.count; ++i) {
        korch_release(own->inputs[i].memory);
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
    for (int64_t i = 0; s->states && i < s->about->states; ++i) korch_release(s->states[i]);
    free(s->plans);
    free(s->sizes);
    free(s->states);
    free(s);
}

KORCH_API korch_session *korch_start(const korch_model *model, int threads, char *error, size_t error_size) {
    korch_session *const s = calloc(1, sizeof *s);
    const about *const own = (const about *)model->numbers;
    bool has_memory = false;
    if (s) {
        *s = (korch_session){.model = model, .about = own, .kept = (const kept *)(own + 1), .threads = threads};
        s->plans = calloc((size_t)model->plans->count + 1, sizeof *s->plans);
        s->sizes = calloc((size_t)own->dimensions + 1, sizeof *s->sizes);
        s->states = calloc((size_t)own->states + 1, sizeof *s->states);
        has_memory = s->plans && s->sizes && s->states;
        for (int64_t i = 0; has_memory && i < own->states; ++i) {
            s->states[i] = korch_allocate(s->kept[i].groups * own->capacity * s->kept[i].row_bytes);
            has_memory = s->states[i];
        }
    }
    if (has_memory) return s;
    snprintf(error, error_size, "out of memory");
    korch_stop(s);
    return NULL;
}

/* Copy the rows from `begin` to `end` of each state, or zeros. */
static void set_rows(korch_session *s, char *const *from, int64_t begin, int64_t end) {
    for (int64_t i = 0; i < s->about->states; ++i)
        for (int64_t k = 0; k < s->kept[i].groups; ++k) {
            const int64_t bytes = s->kept[i].row_bytes, at = (k * s->about->capacity + begin) * bytes;
            const size_t size = (size_t)((end - begin) * bytes);
            if (from) memcpy(s->states[i] + at, from[i] + at, size);
            else memset(s->states[i] + at, 0, size);
        }
}

KORCH_API int64_t korch_length(const korch_session *s) { return s->length; }

KORCH_API int korch_truncate(korch_session *s, int64_t length) {
    if (length < 0 || length > s->length) return 1;
    set_rows(s, NULL, length, s->length);
    s->length = length;
    return 0;
}

KORCH_API korch_session *korch_fork(const korch_session *s, char *error, size_t error_size) {
    korch_session *const found = korch_start(s->model, s->threads, error, error_size);
    if (!found) return NULL;
    set_rows(found, s->states, 0, found->length = s->length);
    return found;
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

/* Read how a tensor of a plan depends on the sizes; compute it if it is not the user's. Return whether there is memory. */
static bool fit(numbers *at, const korch_session *s, const korch_tensor *what, padded *own, bool is_hidden) {
    enum { WHOLE, NEW, ALL, KEPT, APPENDED };
    memcpy(own->shape, what->shape, (size_t)what->rank * sizeof *own->shape);
    if (!is_hidden) {
        if (!read_spans(at, s->sizes, own)) return false;
        const int64_t role = (*at)[1], axis = (*at)[2], bytes = (*at)[3], before = s->length - s->begun;
        own->number = **at;
        own->is_kept = role >= KEPT;
        own->part = own->whole = INT64_MAX;
        own->first = role == NEW ? before * bytes : 0;
        *at += 4;
        if (role == NEW || role == ALL || role == APPENDED) {
            own->shape[axis] = role == NEW ? s->rows : role == ALL ? s->begun + s->rows : s->about->capacity;
            own->part = s->sizes[role != ALL] * bytes;
            own->whole = own->shape[axis] * bytes;
            own->is_whole &= what->size_bytes <= own->part;
        }
    }
    if (!is_hidden && own->is_whole) return true;
    if (own->memory) memset(own->memory, 0, (size_t)what->size_bytes);
    else if (!(own->memory = korch_allocate(what->size_bytes))) return false;
    return !is_hidden || read_hidden(at, s->sizes, what, own->memory);
}

/* Fit a plan to the sizes; return whether there is memory for it. */
static bool fit_plan(korch_session *s, numbers at) {
    used *const own = s->fitted = &s->plans[*at++];
    own->given = *at++;
    for (int64_t i = 0; i < own->plan->inputs.count; ++i)
        if (!fit(&at, s, &own->plan->inputs.rows[i], &own->inputs[i], i >= own->given)) return false;
    for (int64_t i = 0; i < own->plan->outputs.count; ++i)
        if (!fit(&at, s, &own->plan->outputs.rows[i], &own->outputs[i], false)) return false;
    return true;
}

/* Prepare the plans for all parts of a run, once for its rows; return the last one, or null. */
static numbers prepare_parts(korch_session *s, char *error, size_t error_size) {
    const long long begun = s->begun = s->length, end = begun + s->rows, capacity = s->about->capacity;
    numbers found = NULL;
    if (end > capacity)
        snprintf(error, error_size, "%lld rows after %lld exceed the capacity of %lld", end - begun, begun, capacity);
    for (bool is_right = end <= capacity; is_right && s->length < end; s->length = s->sizes[0]) {
        found = choose(s, NULL, end - s->length, error, error_size);
        if (!found || (s->sizes[1] < s->rows && !s->about->is_causal)) {
            snprintf(error, error_size, "no plan runs %lld rows after %lld", end - begun, begun);
            found = NULL;
        } else if (!prepare(s, *found, error, error_size)) found = NULL;
        is_right = found;
    }
    s->length = begun;
    return found;
}

KORCH_API const korch_tensor *korch_fit(korch_session *s, const int64_t *const *shapes, char *error, size_t error_size) {
    numbers found = choose(s, shapes, 0, error, error_size);
    s->fitted = NULL;
    if (found && s->about->states) {
        const long long all = s->sizes[0], wanted = s->length + (s->rows = s->sizes[1] < 0 ? s->about->rows : s->sizes[1]);
        found = prepare_parts(s, error, error_size);
        if (found && all >= 0 && all != wanted) {
            snprintf(error, error_size, "an input has %lld of all rows; expected %lld", all, wanted);
            found = NULL;
        }
    } else if (found && !prepare(s, *found, error, error_size)) found = NULL;
    if (!found) return NULL;
    if (error_size) error[0] = 0; /* other forms may have left a message */
    if (!fit_plan(s, found)) {
        snprintf(error, error_size, "out of memory");
        return NULL;
    }
    used *const own = s->fitted;
    for (int64_t i = 0; i < own->plan->outputs.count; ++i) {
        const padded *const output = &own->outputs[i];
        if (output->is_kept) continue;
        korch_tensor *const result = &own->results[output->number];
        const span *const last = output->spans + output->count - 1;
        *result = own->plan->outputs.rows[i];
        result->shape = output->shape;
        result->size_bytes = output->count ? last->before + last->size : 0;
        if (output->part < INT64_MAX) result->size_bytes = result->size_bytes / output->part * output->whole;
    }
    return own->results;
}

/* Copy a user's tensor to one of the plan's size, or back. */
static void *move(const korch_session *s, const padded *tensor, void *const *users, bool is_back) {
    char *const user = (tensor->is_kept ? s->states[tensor->number] : (char *)users[tensor->number]) + tensor->first;
    for (int64_t i = 0; !tensor->is_whole && i < tensor->count; ++i) {
        const span *const own = &tensor->spans[i];
        for (int64_t done = 0, size; done < own->size; done += size) {
            const int64_t group = (own->before + done) / tensor->part, in = (own->before + done) % tensor->part;
            size = own->size - done < tensor->part - in ? own->size - done : tensor->part - in;
            char *const there = tensor->memory + own->at + done;
            char *const here = user + (group ? group * tensor->whole : 0) + in;
            memcpy(is_back ? here : there, is_back ? there : here, (size_t)size);
        }
    }
    return tensor->is_whole ? user : tensor->memory;
}

static int serve_part(korch_session *s, const void *const *inputs, void *const *outputs) {
    used *const own = s->fitted;
    const int64_t count = own->plan->outputs.count;
    for (int64_t i = 0; i < own->plan->inputs.count; ++i)
        own->reads[i] = i < own->given ? move(s, &own->inputs[i], (void *const *)inputs, false) : own->inputs[i].memory;
    for (int64_t i = 0; i < count; ++i) {
        const padded *const output = &own->outputs[i];
        own->writes[i] = output->is_whole ? move(s, output, outputs, true) : output->memory;
    }
    const int failed = korch_run(own->handle, own->reads, own->writes);
    for (int64_t i = 0; !failed && i < count; ++i) move(s, &own->outputs[i], outputs, true);
    return failed;
}

KORCH_API int korch_serve(korch_session *s, const void *const *inputs, void *const *outputs) {
    int failed = 0;
    if (!s->about->states) return serve_part(s, inputs, outputs);
    if ((!s->fitted || s->begun != s->length) && !prepare_parts(s, NULL, 0)) return KORCH_UNFIT;
    for (const int64_t end = s->begun + s->rows; !failed && s->length < end;) {
        const bool has_memory = fit_plan(s, choose(s, NULL, end - s->length, NULL, 0));
        failed = has_memory ? serve_part(s, inputs, outputs) : KORCH_UNFIT;
        if (failed) set_rows(s, NULL, s->length, s->sizes[0]); /* plans rely on zeros behind the rows */
        else s->length = s->sizes[0];
    }
    return failed;
}

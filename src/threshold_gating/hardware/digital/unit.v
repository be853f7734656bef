// y = sum_k g_k(x) (s_k x + c_k): one unit for every activation. Only the registers differ.
// A tau is tau_m / 2^tau_e, a slope s_m / 2^s_e; theta has FINER bits below x, c has GUARD below y.
// Thresholds that are not on end the sum: an instance may have fewer branches than the unit.

// A stage of the pipeline, or wires.
module tg_stage #(parameter WIDTH = 1, PIPELINE = 1) (
    input clk, input [WIDTH-1:0] d, output [WIDTH-1:0] q
);
    generate
        if (PIPELINE != 0) begin : held
            reg [WIDTH-1:0] kept;
            always @(posedge clk) kept <= d;
            assign q = kept;
        end else begin : open
            wire unused = clk;
            assign q = d;
        end
    endgenerate
endmodule

// A code in more bits.
module tg_extend #(parameter IN = 16, OUT = 17) (
    input signed [IN-1:0] a, output signed [OUT-1:0] y
);
    assign y = {{(OUT-IN+1){a[IN-1]}}, a[IN-2:0]};
endmodule

// The nearest code of OUT bits, which may be more than there are.
module tg_saturate #(parameter IN = 17, OUT = 16) (
    input signed [IN-1:0] a, output signed [OUT-1:0] y
);
    generate
        if (IN > OUT) begin : narrower
            wire fits = &a[IN-1:OUT-1] | ~|a[IN-1:OUT-1];
            assign y = fits ? a[OUT-1:0] : {a[IN-1], {(OUT-1){~a[IN-1]}}};
        end else begin : wider
            tg_extend #(IN, OUT) of_a (.a(a), .y(y));
        end
    endgenerate
endmodule

// (s x + c), and with SQUARE ((q x + s) x + c), in SUM bits.
module tg_branch #(
    parameter BITS = 16, SLOPE = 12, FIRST = 12, SHIFT = 5, GUARD = 2, SUM = 20, SQUARE = 0
) (
    input signed [BITS-1:0] x, v,
    input signed [FIRST-1:0] s_m, input [SHIFT-1:0] s_e, input signed [SUM-1:0] c,
    input signed [SLOPE-1:0] q_m, input [SHIFT-1:0] q_e,
    output signed [SUM-1:0] l
);
    localparam WIDE = BITS + FIRST + GUARD;
    localparam TOTAL = (WIDE > SUM ? WIDE : SUM) + 1;
    wire signed [FIRST-1:0] slope;
    generate
        if (SQUARE != 0) begin : curved
            wire signed [BITS+SLOPE-1:0] bent = (x * q_m) >>> q_e;
            wire signed [BITS+SLOPE:0] bent_wide, s_wide;
            tg_extend #(BITS + SLOPE, BITS + SLOPE + 1) of_bent (.a(bent), .y(bent_wide));
            tg_extend #(FIRST, BITS + SLOPE + 1) of_s (.a(s_m), .y(s_wide));
            wire signed [BITS+SLOPE:0] bracket = bent_wide + s_wide;
            tg_saturate #(BITS + SLOPE + 1, FIRST) in_bits (.a(bracket), .y(slope));
        end else begin : straight
            wire unused = ^{x, q_m, q_e};
            assign slope = s_m;
        end
    endgenerate
    wire signed [BITS+FIRST-1:0] product = v * slope;
    wire signed [WIDE-1:0] raised = {product, {GUARD{1'b0}}};
    wire signed [WIDE-1:0] shifted = raised >>> s_e;
    wire signed [TOTAL-1:0] shifted_wide, c_wide;
    tg_extend #(WIDE, TOTAL) of_shifted (.a(shifted), .y(shifted_wide));
    tg_extend #(SUM, TOTAL) of_c (.a(c), .y(c_wide));
    wire signed [TOTAL-1:0] whole = shifted_wide + c_wide;
    tg_saturate #(TOTAL, SUM) in_sum (.a(whole), .y(l));
endmodule

// One threshold: y + g (l - y), with g from x - theta and the log odds of the threshold below.
module tg_step #(
    parameter BITS = 16, TAU = 10, SLOPE = 12, FIRST = 12, SHIFT = 5, GUARD = 2, SUM = 20,
    FINER = 2, SQUARE = 0, SOFT = 1, FOLLOWS = 0, ODDS = 17, GATE = 15, LOG = 12, PIPELINE = 1
) (
    input clk,
    input signed [BITS-1:0] x, v, input signed [ODDS-1:0] prior, input signed [SUM-1:0] y,
    input signed [BITS+FINER-1:0] theta, input [TAU-1:0] tau_m, input [SHIFT-1:0] tau_e,
    input signed [FIRST-1:0] s_m, input [SHIFT-1:0] s_e, input signed [SUM-1:0] c,
    input signed [SLOPE-1:0] q_m, input [SHIFT-1:0] q_e,
    input hard, closed, on,
    output signed [BITS-1:0] x_on, v_on, output signed [ODDS-1:0] odds,
    output signed [SUM-1:0] y_on
);
    localparam APART = BITS + FINER + 1;
    // First stage: products with registers.
    wire signed [APART-1:0] apart = $signed({x, {FINER{1'b0}}}) - theta;
    wire beyond = ~apart[APART-1] & (closed | |apart);
    wire signed [SUM-1:0] l, l1, l2, l3, y1, y2, y3;
    tg_branch #(BITS, SLOPE, FIRST, SHIFT, GUARD, SUM, SQUARE) branch (
        .x(x), .v(v), .s_m(s_m), .s_e(s_e), .c(c), .q_m(q_m), .q_e(q_e), .l(l));
    wire signed [BITS-1:0] x1, v1, x2, v2, x3, v3;
    wire beyond1, beyond2, beyond3;
    tg_stage #(2*BITS + 2*SUM + 1, PIPELINE) first (
        .clk(clk), .d({x, v, y, l, beyond}), .q({x1, v1, y1, l1, beyond1}));
    tg_stage #(2*BITS + 2*SUM + 1, PIPELINE) second (
        .clk(clk), .d({x1, v1, y1, l1, beyond1}), .q({x2, v2, y2, l2, beyond2}));
    tg_stage #(2*BITS + 2*SUM + 1, PIPELINE) third (
        .clk(clk), .d({x2, v2, y2, l2, beyond2}), .q({x3, v3, y3, l3, beyond3}));
    wire signed [SUM-1:0] sum;
    wire signed [ODDS-1:0] d3;
    generate
        if (SOFT != 0) begin : smooth
            wire signed [APART+TAU:0] scaled = (apart * $signed({1'b0, tau_m})) >>> tau_e;
            wire signed [ODDS-1:0] u, u1, d, d2;
            tg_saturate #(APART + TAU + 1, ODDS) in_odds (.a(scaled), .y(u));
            tg_stage #(ODDS, PIPELINE) stage_u (.clk(clk), .d(u), .q(u1));
            if (FOLLOWS != 0) begin : follows
                wire [LOG-1:0] bend;
                wire [ODDS-1:0] bow1;
                tg_softplus softplus (.u(prior), .y(bend));
                // The lowest code has no opposite; the one below that is taken, as for |u|.
                wire [ODDS-1:0] turned = -prior;
                wire [ODDS-1:0] below = prior[ODDS-1] ? turned - {{(ODDS-1){1'b0}}, turned[ODDS-1]}
                    : {ODDS{1'b0}};
                wire [ODDS-1:0] bow = below + {{(ODDS-LOG){1'b0}}, bend};
                tg_stage #(ODDS, PIPELINE) stage_soft (.clk(clk), .d(bow), .q(bow1));
                wire signed [ODDS+1:0] u_wide;
                tg_extend #(ODDS, ODDS + 2) of_u (.a(u1), .y(u_wide));
                wire signed [ODDS+1:0] less = u_wide - $signed({2'b00, bow1});
                tg_saturate #(ODDS + 2, ODDS) in_less (.a(less), .y(d));
            end else begin : begins
                wire unused = ^prior;
                assign d = u1;
            end
            tg_stage #(ODDS, PIPELINE) stage_d (.clk(clk), .d(d), .q(d2));
            wire [GATE:0] curve;
            tg_sigmoid sigmoid (.u(d2), .g(curve));
            wire [GATE:0] whole = {1'b1, {GATE{1'b0}}};
            wire [GATE:0] g = ~on ? {(GATE+1){1'b0}} : ~hard ? curve
                : beyond2 ? whole : {(GATE+1){1'b0}};
            wire [GATE:0] g3;
            tg_stage #(GATE + 1 + ODDS, PIPELINE) stage_g (.clk(clk), .d({g, d2}), .q({g3, d3}));
            wire signed [SUM:0] far = l3 - y3;
            wire signed [SUM+GATE+2:0] moved = far * $signed({1'b0, g3});
            wire signed [SUM+GATE+2:0] half = {{(SUM+3){1'b0}}, 1'b1, {(GATE-1){1'b0}}};
            wire signed [SUM+GATE+2:0] near = moved + half;
            wire signed [SUM+2:0] move = near[SUM+GATE+2:GATE];
            assign sum = y3 + move[SUM-1:0];
            wire unused2 = ^{near[GATE-1:0], move[SUM+2:SUM], beyond3};
        end else begin : crisp
            wire unused = ^{prior, tau_m, tau_e, hard};
            assign sum = beyond3 & on ? l3 : y3;
            assign d3 = 0;
        end
    endgenerate
    tg_stage #(2*BITS + SUM + ODDS, PIPELINE) last (
        .clk(clk), .d({x3, v3, d3, sum}), .q({x_on, v_on, odds, y_on}));
endmodule

// The unit: the lowest branch, then a step for each threshold, then y in its own bits.
module tg_unit #(
    parameter BITS = 16, BRANCHES = 2, TAU = 10, SLOPE = 12, FIRST = 12, SHIFT = 5, GUARD = 2,
    SUM = 20, FINER = 2, SQUARE = 0, SOFT = 1, ODDS = 17, GATE = 15, LOG = 12, PIPELINE = 1
) (
    input clk,
    input signed [BITS-1:0] x, v,
    input [(BRANCHES-1)*(BITS+FINER)-1:0] theta,
    input [(BRANCHES-1)*TAU-1:0] tau_m, input [(BRANCHES-1)*SHIFT-1:0] tau_e,
    input [BRANCHES*FIRST-1:0] s_m, input [BRANCHES*SHIFT-1:0] s_e,
    input [BRANCHES*SUM-1:0] c,
    input [BRANCHES*SLOPE-1:0] q_m, input [BRANCHES*SHIFT-1:0] q_e,
    input hard, input [BRANCHES-2:0] closed, on,
    input signed [BITS-1:0] low, high,
    output signed [BITS-1:0] y
);
    wire signed [SUM-1:0] lowest;
    tg_branch #(BITS, SLOPE, FIRST, SHIFT, GUARD, SUM, SQUARE) branch (
        .x(x), .v(v), .s_m(s_m[FIRST-1:0]), .s_e(s_e[SHIFT-1:0]), .c(c[SUM-1:0]),
        .q_m(q_m[SLOPE-1:0]), .q_e(q_e[SHIFT-1:0]), .l(lowest));
    wire [BRANCHES*BITS-1:0] xs, vs;
    wire [BRANCHES*ODDS-1:0] ds;
    wire [BRANCHES*SUM-1:0] ys;
    assign ds[ODDS-1:0] = {ODDS{1'b0}};
    tg_stage #(2*BITS + SUM, PIPELINE) first (
        .clk(clk), .d({x, v, lowest}), .q({xs[BITS-1:0], vs[BITS-1:0], ys[SUM-1:0]}));
    genvar k;
    generate
        for (k = 0; k < BRANCHES - 1; k = k + 1) begin : threshold
            tg_step #(
                .BITS(BITS), .TAU(TAU), .SLOPE(SLOPE), .FIRST(FIRST), .SHIFT(SHIFT), .GUARD(GUARD),
                .SUM(SUM), .FINER(FINER), .SQUARE(SQUARE), .SOFT(SOFT), .FOLLOWS(k), .ODDS(ODDS),
                .GATE(GATE), .LOG(LOG), .PIPELINE(PIPELINE)
            ) one (
                .clk(clk), .x(xs[k*BITS +: BITS]), .v(vs[k*BITS +: BITS]),
                .prior(ds[k*ODDS +: ODDS]), .y(ys[k*SUM +: SUM]),
                .theta(theta[k*(BITS+FINER) +: BITS+FINER]),
                .tau_m(tau_m[k*TAU +: TAU]), .tau_e(tau_e[k*SHIFT +: SHIFT]),
                .s_m(s_m[(k+1)*FIRST +: FIRST]), .s_e(s_e[(k+1)*SHIFT +: SHIFT]),
                .c(c[(k+1)*SUM +: SUM]),
                .q_m(q_m[(k+1)*SLOPE +: SLOPE]), .q_e(q_e[(k+1)*SHIFT +: SHIFT]),
                .hard(hard), .closed(closed[k]), .on(on[k]),
                .x_on(xs[(k+1)*BITS +: BITS]), .v_on(vs[(k+1)*BITS +: BITS]),
                .odds(ds[(k+1)*ODDS +: ODDS]), .y_on(ys[(k+1)*SUM +: SUM]));
        end
    endgenerate
    wire unused = ^{xs[(BRANCHES-1)*BITS +: BITS], vs[(BRANCHES-1)*BITS +: BITS],
                    ds[(BRANCHES-1)*ODDS +: ODDS]};
    tg_last #(BITS, SUM, GUARD, PIPELINE) last (
        .clk(clk), .sum(ys[(BRANCHES-1)*SUM +: SUM]), .low(low), .high(high), .y(y));
endmodule

// Rounds a sum to the bits of y, between the bounds.
module tg_last #(parameter BITS = 16, SUM = 20, GUARD = 2, PIPELINE = 1) (
    input clk, input signed [SUM-1:0] sum, input signed [BITS-1:0] low, high,
    output signed [BITS-1:0] y
);
    wire signed [SUM:0] near = sum + $signed({{(SUM-GUARD+1){1'b0}}, 1'b1, {(GUARD-1){1'b0}}});
    wire signed [SUM-GUARD:0] whole = near[SUM:GUARD];
    wire signed [SUM-GUARD:0] low_wide, high_wide;
    tg_extend #(BITS, SUM - GUARD + 1) of_low (.a(low), .y(low_wide));
    tg_extend #(BITS, SUM - GUARD + 1) of_high (.a(high), .y(high_wide));
    wire [BITS-1:0] bounded = whole < low_wide ? low : whole > high_wide ? high : whole[BITS-1:0];
    wire unused = ^near[GUARD-1:0];
    tg_stage #(BITS, PIPELINE) stage (.clk(clk), .d(bounded), .q(y));
endmodule

// The small unit: one multiplier of DIGIT bits, used again for everything. The same codes come out.
// Give x with start; y stands when done is high, until the next start.
module tg_unit_small #(
    parameter BITS = 16, BRANCHES = 2, TAU = 10, SLOPE = 12, FIRST = 12, SHIFT = 5, GUARD = 2,
    SUM = 20, FINER = 2, SQUARE = 0, SOFT = 1, ODDS = 17, GATE = 15, LOG = 12, DIGIT = 4,
    WIDE = 21, DIGITS = 5
) (
    input clk, input start,
    input signed [BITS-1:0] x, v,
    input [(BRANCHES-1)*(BITS+FINER)-1:0] theta,
    input [(BRANCHES-1)*TAU-1:0] tau_m, input [(BRANCHES-1)*SHIFT-1:0] tau_e,
    input [BRANCHES*FIRST-1:0] s_m, input [BRANCHES*SHIFT-1:0] s_e,
    input [BRANCHES*SUM-1:0] c,
    input [BRANCHES*SLOPE-1:0] q_m, input [BRANCHES*SHIFT-1:0] q_e,
    input hard, input [BRANCHES-2:0] closed, on,
    input signed [BITS-1:0] low, high,
    output signed [BITS-1:0] y, output done
);
    localparam [1:0] ODDS_OF = 0, BRACKET_OF = 1, BRANCH_OF = 2, SUM_OF = 3;
    localparam APART = BITS + FINER + 1;
    localparam PLACES = $clog2(DIGITS + 1);
    localparam LOW = DIGIT * DIGITS;  // bits of the second factor
    localparam FULL = WIDE + 1 + LOW + GUARD;
    localparam [1:0] BEGIN = SQUARE != 0 ? BRACKET_OF : BRANCH_OF;
    localparam [1:0] NEXT = SOFT != 0 ? ODDS_OF : BEGIN;

    reg signed [BITS-1:0] held_x, held_v;
    reg signed [SUM-1:0] sum, l;
    reg signed [FIRST-1:0] bracket;
    reg signed [ODDS-1:0] odds;
    reg [WIDE+LOW:0] product;
    localparam COUNT = $clog2(BRANCHES + 1);
    localparam [31:0] HIGHEST = BRANCHES - 1;
    reg [COUNT-1:0] k;
    reg [PLACES-1:0] digit;
    reg [1:0] phase;
    reg busy;

    // What the k-th branch, and the threshold below it, have in their registers.
    wire [COUNT-1:0] t = k == 0 ? k : k - 1'b1;
    reg signed [BITS+FINER-1:0] theta_k;
    reg [TAU-1:0] tau_k;
    reg [SHIFT-1:0] tau_shift, s_shift, q_shift;
    reg signed [SLOPE-1:0] q_k;
    reg signed [FIRST-1:0] s_k;
    reg signed [SUM-1:0] c_k;
    reg closed_k, on_k;
    integer i;
    always @* begin
        theta_k = theta[0 +: BITS+FINER]; tau_k = tau_m[0 +: TAU]; tau_shift = tau_e[0 +: SHIFT];
        closed_k = closed[0]; on_k = on[0];
        s_k = s_m[0 +: FIRST]; s_shift = s_e[0 +: SHIFT]; c_k = c[0 +: SUM];
        q_k = q_m[0 +: SLOPE]; q_shift = q_e[0 +: SHIFT];
        for (i = 1; i < BRANCHES; i = i + 1) begin
            if (t == i[COUNT-1:0] && i < BRANCHES - 1) begin
                theta_k = theta[i*(BITS+FINER) +: BITS+FINER]; tau_k = tau_m[i*TAU +: TAU];
                tau_shift = tau_e[i*SHIFT +: SHIFT]; closed_k = closed[i]; on_k = on[i];
            end
            if (k == i[COUNT-1:0]) begin
                s_k = s_m[i*FIRST +: FIRST]; s_shift = s_e[i*SHIFT +: SHIFT]; c_k = c[i*SUM +: SUM];
                q_k = q_m[i*SLOPE +: SLOPE]; q_shift = q_e[i*SHIFT +: SHIFT];
            end
        end
    end
    wire signed [APART-1:0] apart = $signed({held_x, {FINER{1'b0}}}) - theta_k;
    wire beyond = ~apart[APART-1] & (closed_k | |apart);
    wire [GATE:0] curve;
    wire [ODDS-1:0] bow;
    generate
        if (SOFT != 0) begin : gates
            tg_sigmoid sigmoid (.u(odds), .g(curve));
            if (BRANCHES > 2) begin : follows
                wire [LOG-1:0] bend;
                tg_softplus softplus (.u(odds), .y(bend));
                wire [ODDS-1:0] turned = -odds;
                wire [ODDS-1:0] below = odds[ODDS-1]
                    ? turned - {{(ODDS-1){1'b0}}, turned[ODDS-1]} : {ODDS{1'b0}};
                assign bow = t == 0 ? {ODDS{1'b0}} : below + {{(ODDS-LOG){1'b0}}, bend};
            end else begin : alone
                assign bow = {ODDS{1'b0}};
            end
        end else begin : crisp
            assign curve = {(GATE+1){1'b0}};
            assign bow = {ODDS{1'b0}};
        end
    endgenerate
    wire [GATE:0] g = ~on_k ? {(GATE+1){1'b0}} : ~hard ? curve : {beyond, {GATE{1'b0}}};

    // The multiplier: a digit of the second factor in each cycle.
    wire signed [SUM:0] far = l - sum;
    wire signed [WIDE-1:0] apart_wide, x_wide, v_wide, far_wide;
    tg_extend #(APART, WIDE) of_apart (.a(apart), .y(apart_wide));
    tg_extend #(BITS, WIDE) of_x (.a(held_x), .y(x_wide));
    tg_extend #(BITS, WIDE) of_v (.a(held_v), .y(v_wide));
    tg_extend #(SUM + 1, WIDE) of_far (.a(far), .y(far_wide));
    wire signed [LOW-1:0] tau_wide, q_wide, s_wide, g_wide;
    tg_extend #(TAU + 1, LOW) of_tau (.a({1'b0, tau_k}), .y(tau_wide));
    tg_extend #(SLOPE, LOW) of_q (.a(q_k), .y(q_wide));
    tg_extend #(FIRST, LOW) of_slope (.a(SQUARE != 0 ? bracket : s_k), .y(s_wide));
    tg_extend #(GATE + 2, LOW) of_g (.a({1'b0, g}), .y(g_wide));
    localparam MOST = $clog2(GATE + 1) > SHIFT ? $clog2(GATE + 1) : SHIFT;
    localparam AMOUNT = MOST + 1;  // bits of a shift: of registers, and of a gate
    wire [AMOUNT-SHIFT-1:0] none = 0;
    reg signed [WIDE-1:0] a;
    reg signed [LOW-1:0] b;
    reg [AMOUNT-1:0] amount;
    always @* case (phase)
        ODDS_OF: begin a = apart_wide; b = tau_wide; amount = {none, tau_shift}; end
        BRACKET_OF: begin a = x_wide; b = q_wide; amount = {none, q_shift}; end
        BRANCH_OF: begin a = v_wide; b = s_wide; amount = {none, s_shift}; end
        default: begin a = far_wide; b = g_wide; amount = GATE[AMOUNT-1:0]; end
    endcase
    localparam [31:0] LAST = DIGITS - 1;
    wire is_last = digit == LAST[PLACES-1:0];
    reg [DIGIT-1:0] now;
    integer j;
    always @* begin
        now = b[0 +: DIGIT];
        for (j = 1; j < DIGITS; j = j + 1)
            if (digit == j[PLACES-1:0]) now = b[j*DIGIT +: DIGIT];
    end
    wire signed [WIDE:0] above = digit == 0 ? {(WIDE+1){1'b0}} : product[WIDE+LOW:LOW];
    wire signed [WIDE+DIGIT:0] times = a * $signed({is_last & now[DIGIT-1], now});
    wire signed [WIDE+DIGIT:0] above_wide;
    tg_extend #(WIDE + 1, WIDE + DIGIT + 1) of_above (.a(above), .y(above_wide));
    wire signed [WIDE+DIGIT:0] part = above_wide + times;
    wire signed [WIDE+LOW:0] full = {part, product[LOW-1:DIGIT]};
    // What becomes of a product.
    wire signed [FULL-1:0] full_wide;
    tg_extend #(WIDE + LOW + 1, FULL) of_full (.a(full), .y(full_wide));
    wire signed [FULL-1:0] guarded = {full, {GUARD{1'b0}}};
    wire signed [FULL-1:0] half = {{(FULL-GATE){1'b0}}, phase == SUM_OF, {(GATE-1){1'b0}}};
    wire signed [FULL-1:0] near = full_wide + half;
    wire signed [FULL-1:0] raised = phase == BRANCH_OF ? guarded : near;
    wire signed [FULL-1:0] shifted = raised >>> amount;
    wire signed [ODDS-1:0] u, d;
    tg_saturate #(FULL, ODDS) in_odds (.a(shifted), .y(u));
    wire signed [ODDS+1:0] u_wide;
    tg_extend #(ODDS, ODDS + 2) of_u (.a(u), .y(u_wide));
    wire signed [ODDS+1:0] less = u_wide - $signed({2'b00, bow});
    tg_saturate #(ODDS + 2, ODDS) in_less (.a(less), .y(d));
    wire signed [FIRST-1:0] bent;
    wire signed [FULL:0] shifted_wide, s_far, c_far;
    tg_extend #(FULL, FULL + 1) of_shifted (.a(shifted), .y(shifted_wide));
    tg_extend #(FIRST, FULL + 1) of_s (.a(s_k), .y(s_far));
    tg_extend #(SUM, FULL + 1) of_c (.a(c_k), .y(c_far));
    wire signed [FULL:0] with_s = shifted_wide + s_far;
    tg_saturate #(FULL + 1, FIRST) in_bits (.a(with_s), .y(bent));
    wire signed [SUM-1:0] l_k;
    wire signed [FULL:0] with_c = shifted_wide + c_far;
    tg_saturate #(FULL + 1, SUM) in_sum (.a(with_c), .y(l_k));

    always @(posedge clk)
        if (start) begin
            held_x <= x; held_v <= v; k <= 0; digit <= 0; phase <= BEGIN; busy <= 1;
        end else if (busy) begin
            product <= full;
            digit <= is_last ? 0 : digit + 1;
            if (is_last) case (phase)
                ODDS_OF: begin odds <= d; phase <= BEGIN; end
                BRACKET_OF: begin bracket <= bent; phase <= BRANCH_OF; end
                BRANCH_OF: begin
                    l <= l_k;
                    if (k == 0 || SOFT == 0) begin
                        if (k == 0 || (beyond & on_k)) sum <= l_k;
                        phase <= NEXT; k <= k + 1; busy <= k != HIGHEST[COUNT-1:0];
                    end else phase <= SUM_OF;
                end
                default: begin
                    sum <= sum + shifted[SUM-1:0];
                    phase <= NEXT; k <= k + 1; busy <= k != HIGHEST[COUNT-1:0];
                end
            endcase
        end
    wire unused = ^{product[DIGIT-1:0], odds};  // bits that are cut off
    assign done = ~busy & ~start;
    tg_last #(BITS, SUM, GUARD, 0) last (.clk(clk), .sum(sum), .low(low), .high(high), .y(y));
endmodule

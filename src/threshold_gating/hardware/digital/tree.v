// log(exp a + exp b) in the codes of a and b, a cell of the tree that gives each key of a softmax
// its threshold: max(a, b) + log(1 + exp(-|a - b|)). The lowest code takes no part.
// A difference is a u when it is raised by ODDS - 1 bits and lowered by r; the way back is r bits
// up and ODDS - 1 down. So r is the only register: it says what fraction bits a and b have.
module tg_pair #(
    parameter WIDTH = 18, PLACES = 6, ODDS = 17, LOG = 12, PIPELINE = 1
) (
    input clk, input signed [WIDTH-1:0] a, b, input [PLACES-1:0] r,
    output signed [WIDTH-1:0] y
);
    localparam UP = ODDS - 1;
    localparam APART = WIDTH + UP + 2;
    localparam BOW = LOG + WIDTH + UP + 2;
    wire [WIDTH-1:0] off = {1'b1, {(WIDTH-1){1'b0}}};
    wire signed [WIDTH:0] less = a - b;
    wire signed [APART-1:0] apart;
    tg_extend #(WIDTH + 1 + UP, APART) of_apart (.a({less, {UP{1'b0}}}), .y(apart));
    wire [APART-1:0] last = {{(APART-1){1'b0}}, 1'b1} << r;
    wire signed [APART-1:0] half = {1'b0, last[APART-1:1]};
    wire signed [APART-1:0] near = apart + half;
    wire signed [APART-1:0] lowered = near >>> r;
    wire signed [ODDS-1:0] u, u1;
    tg_saturate #(APART, ODDS) in_odds (.a(lowered), .y(u));
    wire signed [WIDTH-1:0] top, top1;
    wire alone, alone1;
    assign top = less[WIDTH] ? b : a;
    assign alone = a == off | b == off;
    tg_stage #(ODDS + WIDTH + 1, PIPELINE) first (
        .clk(clk), .d({u, top, alone}), .q({u1, top1, alone1}));
    wire [LOG-1:0] bend;
    tg_softplus softplus (.u(u1), .y(bend));
    wire [BOW-1:0] raised = {{(BOW-LOG){1'b0}}, bend} << r;
    wire [BOW-1:0] bow = raised + {{(BOW-UP){1'b0}}, 1'b1, {(UP-1){1'b0}}};
    wire signed [BOW-UP+1:0] top_wide, sum;
    tg_extend #(WIDTH, BOW - UP + 2) of_top (.a(top1), .y(top_wide));
    assign sum = top_wide + $signed({2'b00, bow[BOW-1:UP]});
    wire signed [WIDTH-1:0] more;
    tg_saturate #(BOW - UP + 2, WIDTH) in_width (.a(sum), .y(more));
    wire unused = ^{last[0], bow[UP-1:0]};
    tg_stage #(WIDTH, PIPELINE) second (.clk(clk), .d(alone1 ? top1 : more), .q(y));
endmodule

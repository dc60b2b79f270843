//! Formats numbers, durations and tables for people. Pure functions; no I/O.

use std::fmt::Write;

use crate::base::units::{Bytes, counted};

/// ANSI styling, or none.
#[derive(Clone, Copy, Debug, Default)]
pub struct AnsiStyle {
    pub color: bool,
}

impl AnsiStyle {
    fn wrap(self, code: &str, text: &str) -> String {
        if self.color && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
    pub fn bold(self, text: &str) -> String {
        self.wrap("1", text)
    }
    pub fn dim(self, text: &str) -> String {
        self.wrap("2", text)
    }
    pub fn red(self, text: &str) -> String {
        self.wrap("31", text)
    }
    pub fn green(self, text: &str) -> String {
        self.wrap("32", text)
    }
    pub fn yellow(self, text: &str) -> String {
        self.wrap("33", text)
    }
    pub fn cyan(self, text: &str) -> String {
        self.wrap("36", text)
    }
}

/// Four decimals in a readable range, scientific notation elsewhere: `0.1832`, `3.10e-5`.
pub fn number(x: f64) -> String {
    match x.abs() {
        0.0 => "0.0000".into(),
        a if (1e-3..1e5).contains(&a) => format!("{x:.4}"),
        a if a.is_finite() => format!("{x:.2e}"),
        _ => x.to_string(),
    }
}

/// Three significant digits: `212 MiB`, `22.1 GiB`, `1.50 KiB`.
pub fn bytes(n: u64) -> String {
    let text = Bytes(n).to_string();
    match text.split_once(' ') {
        Some((digits, unit)) if digits.contains('.') => {
            let keep = match digits.find('.') {
                Some(3..) => digits.find('.').unwrap_or(digits.len()),
                _ => digits.len().min(4),
            };
            format!("{} {unit}", &digits[..keep])
        }
        _ => text,
    }
}

/// `0.3 s`, `12 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`.
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "?".into();
    }
    if seconds < 9.95 {
        return format!("{seconds:.1} s");
    }
    let s = seconds.round() as u64;
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {:02} s", s / 60, s % 60),
        3600..86_400 => format!("{} h {:02} min", s / 3600, s % 3600 / 60),
        _ => format!("{} d {:02} h", s / 86_400, s % 86_400 / 3600),
    }
}

/// `3 epochs`, `1.25 epochs`.
pub fn epochs(n: f64) -> String {
    if n.fract() == 0.0 {
        return counted(n as u64, "epoch");
    }
    // Rounded down: an epoch that is not complete does not count as one.
    let hundredths = (n * 100.0 + 1e-6).floor() as u64;
    match hundredths {
        0 => "less than 0.01 epochs".into(),
        _ => format!("{} epochs", hundredths as f64 / 100.0),
    }
}

/// `part` of `whole` in percent: `12.5 %`.
pub fn percent(part: f64, whole: f64) -> String {
    if whole > 0.0 { format!("{:.1} %", 100.0 * part / whole) } else { "-".into() }
}

/// A bar with `filled` (0 to 1) of `width` cells, in eighths of a cell.
pub fn bar(filled: f64, width: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (filled.clamp(0.0, 1.0) * width as f64 * 8.0).round() as usize;
    "█".repeat(eighths / 8) + EIGHTHS[eighths % 8]
}

/// Aligns rows in columns two spaces apart; `align` has one `<` or `>` per column. Trims trailing spaces.
pub fn table(align: &str, indent: usize, rows: &[Vec<String>]) -> Vec<String> {
    let width = |text: &str| console::measure_text_width(text);
    let widths: Vec<usize> = (0..align.len())
        .map(|c| rows.iter().filter_map(|row| row.get(c)).map(|cell| width(cell)).max().unwrap_or(0))
        .collect();
    let line = |row: &Vec<String>| {
        let mut out = " ".repeat(indent);
        for ((cell, side), wide) in row.iter().zip(align.chars()).zip(&widths) {
            let blank = " ".repeat(wide - width(cell));
            let _ = if side == '<' { write!(out, "{cell}{blank}  ") } else { write!(out, "{blank}{cell}  ") };
        }
        out.trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// Breaks lines at spaces to fit a width; what follows is indented to the text after the label. The bars of a table
/// shrink together.
pub fn wrap(lines: &[String], width: usize) -> Vec<String> {
    let lines = shrink_bars(lines, width);
    lines
        .iter()
        .flat_map(|line| wrap_line(line, width, label_width(&console::strip_ansi_codes(line))))
        .collect()
}

/// As [`wrap`], with what follows indented by `indent`; without a width, the lines as they are.
pub fn wrap_to(lines: &[String], width: Option<usize>, indent: usize) -> Vec<String> {
    let Some(width) = width else { return lines.to_vec() };
    shrink_bars(lines, width).iter().flat_map(|line| wrap_line(line, width, indent)).collect()
}

/// Bars shorter than this say nothing.
const MIN_BAR_CELLS: usize = 4;

/// Shortens the bars at the ends of lines by one factor per table, so that each fits the width; drops all bars of a
/// table that has no space for them. Tables are separated by empty lines.
fn shrink_bars(lines: &[String], width: usize) -> Vec<String> {
    let mut out = Vec::with_capacity(lines.len());
    for table in lines.split_inclusive(|line| line.is_empty()) {
        let bars = || table.iter().filter_map(|line| split_bar(line));
        let cells = bars().map(|(_, bar)| console::measure_text_width(bar)).max().unwrap_or(0);
        let text = bars().map(|(text, _)| console::measure_text_width(text)).max().unwrap_or(0);
        let space = width.saturating_sub(text);
        out.extend(table.iter().map(|line| match split_bar(line) {
            Some((text, _)) if cells > space && space < MIN_BAR_CELLS => text.trim_end().to_owned(),
            Some((text, bar)) if cells > space => {
                (text.to_owned() + &scale_bar(bar, space as f64 / cells as f64)).trim_end().to_owned()
            }
            _ => line.clone(),
        }));
    }
    out
}

/// A line that ends in a bar: what stands before it, and the bar, which may be colored.
fn split_bar(line: &str) -> Option<(&str, &str)> {
    let (text, _) = line.trim_end().rsplit_once(' ')?;
    let bar = &line.trim_end()[text.len() + 1..];
    let cells = console::strip_ansi_codes(bar);
    let is_bar = !cells.is_empty() && cells.chars().all(|c| ('\u{2580}'..='\u{259f}').contains(&c));
    is_bar.then_some((&line[..text.len() + 1], bar))
}

/// A bar of [`bar`] or of `▇`, shortened to `factor` of its length, in its color.
fn scale_bar(text: &str, factor: f64) -> String {
    let cells = console::strip_ansi_codes(text).into_owned();
    let scaled = match cells.starts_with('▇') {
        true => "▇".repeat((cells.chars().count() as f64 * factor).ceil() as usize),
        false => {
            // From `█`, eight eighths, to `▏`, one.
            let eighths: u32 = cells.chars().map(|c| 0x2590_u32.saturating_sub(u32::from(c))).sum();
            let width = cells.chars().count();
            bar(f64::from(eighths) * factor / (8 * width) as f64, width)
        }
    };
    text.replace(&cells, &scaled)
}

fn wrap_line(line: &str, width: usize, indent: usize) -> Vec<String> {
    if console::measure_text_width(line) <= width {
        return vec![line.to_owned()];
    }
    let line = line.trim_end();
    let indent = indent.min(width / 2);
    // Between fields, which are two spaces apart, if that suffices; otherwise between words.
    let by_fields = break_at(line, "  ", width, indent);
    match by_fields.iter().all(|line| console::measure_text_width(line) <= width) {
        true => by_fields,
        false => by_fields.iter().flat_map(|line| break_at(line, " ", width, indent)).collect(),
    }
}

/// Breaks a line at gaps of at least `gap`, where it would exceed the width.
fn break_at(line: &str, gap: &str, width: usize, indent: usize) -> Vec<String> {
    let (mut out, mut current, mut blank) = (Vec::new(), String::new(), String::new());
    let mut rest = line;
    while !rest.is_empty() {
        let spaces = rest.len() - rest.trim_start_matches(' ').len();
        blank += &rest[..spaces];
        rest = &rest[spaces..];
        let end = rest.find(gap).unwrap_or(rest.len());
        let (text, after) = rest.split_at(end);
        let begin = console::measure_text_width(&current) + blank.len();
        // A label stays with the first field, however long that is.
        if begin + console::measure_text_width(text) > width && begin > indent {
            out.push(std::mem::take(&mut current));
            blank = " ".repeat(indent);
        }
        current += &std::mem::take(&mut blank);
        current += text;
        rest = after;
    }
    out.push(current);
    out
}

/// Where the text after a label of at most nine columns begins; 0 without a label.
fn label_width(line: &str) -> usize {
    let after_spaces = line.len() - line.trim_start().len();
    if after_spaces > 0 {
        return after_spaces;
    }
    let Some(word) = line.find(' ') else { return 0 };
    let begin = word + line[word..].len() - line[word..].trim_start().len();
    if begin <= 9 { begin } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_the_digits_that_matter() {
        let shown = [0.18321, 2.71284, 3.1e-5, -1e9, 0.0, f64::NAN, f64::INFINITY].map(number);
        assert_eq!(shown, ["0.1832", "2.7128", "3.10e-5", "-1.00e9", "0.0000", "NaN", "inf"]);
        assert_eq!(
            [17, 1536, 212 << 20, 22_600 << 20].map(bytes),
            ["17 B", "1.50 KiB", "212 MiB", "22.0 GiB"]
        );
        assert_eq!(
            [0.04, 9.96, 12.0, 185.0, 7620.0, 273_600.0, f64::NAN].map(duration),
            ["0.0 s", "10 s", "12 s", "3 min 05 s", "2 h 07 min", "3 d 04 h", "?"]
        );
        assert_eq!([percent(1.0, 8.0), percent(1.0, 0.0)], ["12.5 %", "-"]);
        assert_eq!(
            [1.0, 2.0, 1.25, 1.2, 0.29, 0.999, 0.001].map(epochs),
            [
                "1 epoch",
                "2 epochs",
                "1.25 epochs",
                "1.2 epochs",
                "0.29 epochs",
                "0.99 epochs",
                "less than 0.01 epochs"
            ]
        );
    }

    #[test]
    fn a_bar_is_exact_to_an_eighth_and_stays_in_its_width() {
        assert_eq!(bar(0.5, 4), "██");
        assert_eq!(bar(0.34375, 4), "█▍");
        assert_eq!(bar(7.0, 3), "███");
        assert_eq!(bar(f64::NAN, 3), "");
    }

    #[test]
    fn long_lines_break_at_spaces_and_keep_their_label_apart() {
        let wrapped = |line: &str, width| wrap(&[line.to_owned()], width);
        assert_eq!(wrapped("eval   step 4  loss 0.25", 24), ["eval   step 4  loss 0.25"]);
        assert_eq!(wrapped("eval   step 4  loss 0.25", 23), ["eval   step 4", "       loss 0.25"]);
        assert_eq!(
            wrapped("eval   step 4  loss 0.25", 12),
            ["eval", "      step 4", "      loss", "      0.25"]
        );
        assert_eq!(wrapped("       weights  20 MiB  ████", 24), ["       weights  20 MiB"]);
        let line = "    x    number, standardized".to_owned();
        assert_eq!(wrap_to(&[line], Some(22), 9), ["    x    number,", "         standardized"]);
        assert_eq!(
            wrapped("\x1b[1mrun   \x1b[0m aaaa  bbbb  cccc", 16),
            ["\x1b[1mrun   \x1b[0m aaaa", "       bbbb", "       cccc"]
        );
        for width in 1..40 {
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            let line = "stop   finishing the update, then a checkpoint; press Ctrl-C again to leave now";
            assert_eq!(words(&wrapped(line, width).join(" ")), words(line));
        }
    }

    /// The largest of a table has the longest bar at any width, and another table keeps its own scale.
    #[test]
    fn bars_shrink_together_or_go_together() {
        let cyan = |text: &str| AnsiStyle { color: true }.cyan(text);
        let lines = [
            "  weights  10 %  █▌".to_owned(),
            format!("  batch    90 %  {}", cyan("████████████")),
            "  process   0 %".into(),
            String::new(),
            "  forward  ████".into(),
        ];
        let narrow = [
            "  weights  10 %  ▊".to_owned(),
            format!("  batch    90 %  {}", cyan("██████")),
            "  process   0 %".into(),
            String::new(),
            "  forward  ████".into(),
        ];
        assert_eq!(wrap(&lines, 29), lines);
        assert_eq!(wrap(&lines, 23), narrow);
        assert_eq!(wrap(&lines, 20)[..2], ["  weights  10 %", "  batch    90 %"]);
        assert_eq!(
            wrap(&["up to 9  ▇▇▇▇▇▇▇▇".to_owned(), "up to 99  ▇".into()], 14),
            ["up to 9  ▇▇▇▇", "up to 99  ▇"]
        );
    }

    #[test]
    fn columns_align_and_colour_has_no_width() {
        let rows = [vec![AnsiStyle { color: true }.bold("a"), "1".into()], vec!["bb".into(), "10".into()]];
        assert_eq!(table("<>", 1, &rows), [" \x1b[1ma\x1b[0m    1", " bb  10"]);
    }
}

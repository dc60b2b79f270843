//! Formats numbers, durations and tables for people. Pure functions; no I/O.

use std::fmt::Write;

use crate::base::units::Bytes;

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

/// Breaks lines at spaces to fit a width; what follows is indented to the text after the label. Drops a bar at the
/// end of a line that does not fit.
pub fn wrap(lines: &[String], width: usize) -> Vec<String> {
    lines.iter().flat_map(|line| wrap_line(line, width)).collect()
}

fn wrap_line(line: &str, width: usize) -> Vec<String> {
    if console::measure_text_width(line) <= width {
        return vec![line.to_owned()];
    }
    let is_bar =
        |word: &str| console::strip_ansi_codes(word).chars().all(|c| ('\u{2580}'..='\u{259f}').contains(&c));
    let line = line.trim_end();
    if let Some((rest, _)) = line.rsplit_once(' ').filter(|(_, last)| is_bar(last)) {
        return wrap_line(rest.trim_end(), width);
    }
    let indent = label_width(&console::strip_ansi_codes(line)).min(width / 2);
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

    #[test]
    fn columns_align_and_colour_has_no_width() {
        let rows = [vec![AnsiStyle { color: true }.bold("a"), "1".into()], vec!["bb".into(), "10".into()]];
        assert_eq!(table("<>", 1, &rows), [" \x1b[1ma\x1b[0m    1", " bb  10"]);
    }
}
